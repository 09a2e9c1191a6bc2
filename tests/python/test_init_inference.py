"""`deepspeed.init_inference`: the module's own numbers and generate()'s own tokens, from the inference engine."""
import deepspeed
import pytest
import ranks
import torch
import transformers
from inference_models import save_tiny, smollm2_path

FAMILIES = ["llama", "gpt2", "qwen3_moe", "phi"]


def injected(model, **keywords):
    return deepspeed.init_inference(model, **{"dtype": torch.float32, "replace_with_kernel_inject": True, **keywords})


def ids(rows, length, seed=1):
    return torch.randint(3, 250, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("family", FAMILIES)
def test_forward_and_generate_are_the_modules(family, tmp_path):
    model = save_tiny(family, tmp_path)
    tokens = ids(2, 30)
    with torch.no_grad():
        logits = model(tokens).logits
    wanted = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=15, do_sample=False, pad_token_id=0)
    engine = injected(model)
    assert (engine(tokens).logits - logits).abs().max() < 1e-4
    assert engine.generate(tokens, max_new_tokens=15, do_sample=False, pad_token_id=0).tolist() == wanted.tolist()
    assert engine.module is model and engine.config is model.config
    engine.destroy()
    with pytest.raises(RuntimeError, match="closed"):
        engine(tokens)


def test_padding_on_the_left_and_ends_of_different_lengths(tmp_path):
    model = save_tiny("llama", tmp_path)
    tokens, mask = ids(3, 20), torch.ones(3, 20, dtype=torch.long)
    for row, padding in enumerate((0, 5, 12)):
        tokens[row, :padding], mask[row, :padding] = 0, 0
    ends = model.generate(tokens, attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=0)
    end = int(ends[0, 20 + 4])                     # what the first row generates fifth ends rows here, so that they end at different places
    engine = injected(model)
    for more in ({}, {"eos_token_id": end}, {"eos_token_id": [end, 7], "min_new_tokens": 8}, {"repetition_penalty": 1.5},
                 {"max_new_tokens": None, "max_length": 26}, {"eos_token_id": -1}, {"eos_token_id": [5000, end]}):
        options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, **more}
        assert engine.generate(tokens, **options).tolist() == model.generate(tokens, **options).tolist(), more
    empty = {"streamer": None, "logits_processor": [], "stopping_criteria": transformers.StoppingCriteriaList(), "synced_gpus": False,
             "output_scores": True}
    options = {"attention_mask": mask, "max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(engine.generate(tokens, **options, **empty), engine.generate(tokens, **options))
    with pytest.raises(ValueError, match="input_ids"):
        engine.generate(tokens[:0])
    with pytest.raises(ValueError, match="padding on the left"):
        engine.generate(tokens, attention_mask=mask.flip(1), max_new_tokens=2)
    engine.destroy()


def test_sampling_follows_torchs_seed(tmp_path):
    model = save_tiny("llama", tmp_path)
    engine = injected(model)
    options = {"max_new_tokens": 10, "do_sample": True, "temperature": 0.9, "top_p": 0.95, "num_return_sequences": 3, "pad_token_id": 0}
    torch.manual_seed(3)
    first = engine.generate(ids(2, 9), **options)
    torch.manual_seed(3)
    assert first.shape[0] == 6 and torch.equal(first, engine.generate(ids(2, 9), **options))
    assert not torch.equal(first, engine.generate(ids(2, 9), **options))
    for one in ({"top_k": 1, "top_p": 1.5}, {"top_p": 0.0}):
        greedy = engine.generate(ids(2, 9), max_new_tokens=10, do_sample=True, pad_token_id=0, **one)
        assert greedy.tolist() == engine.generate(ids(2, 9), max_new_tokens=10, do_sample=False, pad_token_id=0).tolist()
    engine.destroy()


@pytest.mark.parametrize("options, says", [
    ({"num_beams": 4}, "num_beams"), ({"no_repeat_ngram_size": 2}, "no_repeat_ngram_size"), ({"streamer": object()}, "streamer"),
    ({"return_dict_in_generate": True}, "return_dict_in_generate")])
def test_what_generate_has_and_the_engine_has_not_is_named(options, says, tmp_path):
    engine = injected(save_tiny("llama", tmp_path))
    with pytest.raises(NotImplementedError, match=says):
        engine.generate(ids(1, 4), max_new_tokens=3, **options)
    with pytest.raises(NotImplementedError, match="labels"):
        engine(ids(1, 4), labels=ids(1, 4))
    engine.destroy()


class Doubling(torch.nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def double(module, *_):
    return None


@pytest.mark.parametrize("change, says", [
    (lambda m: m.model.layers[1].register_forward_hook(double), "'model.layers.1' .LlamaDecoderLayer. has a forward hook .double"),
    (lambda m: m.model.register_forward_pre_hook(double), "'model' .LlamaModel. has a forward pre-hook"),
    (lambda m: setattr(m.model.norm, "forward", lambda x: x), "'model.norm' .LlamaRMSNorm. has a forward.. that was put"),
    (lambda m: setattr(m.model.layers[0].mlp, "up_proj", Doubling(64, 96, bias=False)), "up_proj' .Doubling. has a forward.. of"),
    (lambda m: setattr(m.model, "norm", torch.nn.LayerNorm(64)), "'model.norm' .LayerNorm. isn't what transformers builds"),
    (lambda m: delattr(m.model.layers[2], "mlp"), "has no 'model.layers.2.mlp'"),
    (lambda m: m.model.add_module("extra", torch.nn.Linear(2, 2)), "'model.extra' .Linear. isn't what"),
])
def test_a_module_that_was_changed_is_not_computed_without_the_change(change, says, tmp_path):
    model = save_tiny("llama", tmp_path)
    change(model)
    with pytest.raises(NotImplementedError, match=says):
        injected(model)
    deepspeed.init_inference(model, dtype=torch.float32)             # which runs the module itself


def test_hooks_that_transformers_leaves_are_no_change(tmp_path):
    model = save_tiny("llama", tmp_path)
    model(ids(1, 4), output_hidden_states=True, output_attentions=True)
    engine = injected(model)
    assert engine(ids(1, 4)).logits.shape == (1, 4, 259)
    engine.destroy()


def test_without_kernels_the_module_runs_in_the_dtype(tmp_path):
    model = save_tiny("llama", tmp_path)
    engine = deepspeed.init_inference(model, dtype=torch.bfloat16)
    assert engine(ids(1, 5)).logits.dtype == torch.bfloat16
    assert engine.generate(ids(1, 5), max_new_tokens=4, do_sample=False, pad_token_id=0).shape == (1, 9)
    plain = torch.nn.Linear(3, 2)
    assert deepspeed.init_inference(plain, dtype="fp32")(torch.ones(1, 3)).shape == (1, 2)


@pytest.mark.parametrize("keywords", [
    {"enable_cuda_graph": True}, {"zero": {"stage": 3}}, {"triangular_masking": False}, {"base_dir": "a"}, {"set_empty_params": True},
    {"training_mp_size": 2}, {"checkpoint_config": {"checkpoint_dir": None}}, {"quant": {"enabled": False}}, {"transposed_mode": True},
    {"injection_policy": {torch.nn.Linear: "0"}}, {"dtype": "bfloat"}])
def test_keys_that_only_deepspeeds_kernels_read_change_nothing_without_them(keywords):
    module = torch.nn.Sequential(torch.nn.Linear(2, 2))
    engine = deepspeed.init_inference(module, **{"dtype": torch.float32, **keywords})
    assert torch.equal(engine(torch.ones(1, 2).to(engine.settings.dtype)), module(torch.ones(1, 2).to(engine.settings.dtype)))


def test_without_kernels_the_modules_mode_stays_and_generate_is_there_where_it_has_one(tmp_path):
    plain = deepspeed.init_inference(torch.nn.Sequential(torch.nn.Dropout(0.5)), dtype=torch.float32)
    assert plain.module.training and (plain(torch.ones(1000)) == 0).any()
    assert not hasattr(plain, "generate") and plain.mp_group is None and not plain.is_compiled
    engine = deepspeed.init_inference(save_tiny("llama", tmp_path), dtype=torch.float32, max_out_tokens=6)
    with pytest.raises(NotImplementedError, match="num_beams"):
        engine.generate(ids(1, 5), generation_config=transformers.GenerationConfig(num_beams=2))
    with pytest.raises(RuntimeError, match="7 tokens and max_out_tokens of init_inference is 6"):
        engine.generate(input_ids=ids(1, 7))
    assert engine.generate(input_ids=ids(1, 6), max_new_tokens=3, do_sample=False).shape == (1, 9)


def test_the_time_of_forwards():
    engine = deepspeed.init_inference(torch.nn.Linear(2, 2), dtype=torch.float32)
    with pytest.raises(RuntimeError, match="profile_model_time"):
        engine.model_times()
    engine.profile_model_time(use_cuda_events=False)
    for _ in range(2):
        engine(torch.ones(2))
    assert len(engine.model_times()) == 2 and engine.model_times() == []


def whole_on_each(rank, world, folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    engine = deepspeed.init_inference(model, dtype=torch.float32, tensor_parallel={"tp_size": world})
    wanted = model.generate(ids(2, 9), max_new_tokens=4, do_sample=False, pad_token_id=0).tolist()
    torch.manual_seed(rank)
    engine = deepspeed.init_inference(model, dtype=torch.float32, mp_size=world)
    drawn = engine.generate(ids(2, 9), max_new_tokens=4, do_sample=True, pad_token_id=0).tolist()
    return engine.generate(ids(2, 9), max_new_tokens=4, do_sample=False, pad_token_id=0).tolist() == wanted, drawn


def test_without_kernels_every_rank_computes_the_whole_module(tmp_path):
    save_tiny("llama", tmp_path)
    (same, drawn), (same_too, drawn_too) = ranks.run_ranks(2, whole_on_each, str(tmp_path), limit=90)
    assert same and same_too and drawn == drawn_too


def test_the_defaults_are_settings():
    defaults = deepspeed.default_inference_config()
    assert defaults["dtype"] == torch.float16 and defaults["max_out_tokens"] == 1024
    deepspeed.init_inference(torch.nn.Linear(2, 2), {**defaults, "dtype": torch.float32})


@pytest.mark.parametrize("config, keywords, error, says", [
    ({"dtype": "fp32"}, {"dtype": "bf16"}, ValueError, "say it once"),
    ({"replace_with_kernel_injection": True}, {}, ValueError, "did you mean"),
    ({}, {"dtype": "fp64"}, ValueError, "fp64"), ({"quant": {"enabled": True}}, {}, NotImplementedError, "quant"),
    ({}, {"mp_size": 2, "tensor_parallel": {"tp_size": 4}}, ValueError, "mp_size"),
    ({}, {"tp": {"tp_size": 2}}, ValueError, "tp_size is 2 and there are 1 ranks"),
    ({}, {"injection_policy": {torch.nn.Linear: ("attention.dense",)}}, ValueError, "'attention.dense'"),
    ({}, {"injection_policy": {torch.nn.Linear: ("weight",)}, "replace_with_kernel_inject": True}, ValueError, "give one of them"),
    ({}, {"triangular_masking": False, "replace_with_kernel_inject": True}, NotImplementedError, "triangular_masking"),
    ({}, {"replace_with_kernel_inject": True}, ValueError, "Hugging Face"), (3, {}, ValueError, "int"),
])
def test_wrong_settings_are_named(config, keywords, error, says):
    with pytest.raises(error, match=says):
        deepspeed.init_inference(torch.nn.Linear(2, 2), config, **keywords)


def test_as_many_ranks_as_tp_size_are_needed(tmp_path):
    with pytest.raises(ValueError, match="tp_size is 2 and there are 1 ranks"):
        injected(save_tiny("llama", tmp_path), tensor_parallel={"tp_size": 2})


def of_rank(rank, world, folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    engine = injected(model, tensor_parallel={"tp_size": world})
    tokens = ids(2, 12)
    out = engine.generate(tokens, max_new_tokens=8, do_sample=False, pad_token_id=0)
    wanted = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=8, do_sample=False, pad_token_id=0)
    with torch.no_grad():
        difference = float((engine(tokens).logits - model(tokens).logits).abs().max())
    same = out.tolist() == wanted.tolist()
    try:
        engine.generate(tokens, max_new_tokens=500)
        far = "no error"
    except ValueError as error:
        far = str(error)
    engine.destroy()
    return same, difference, far


def test_two_ranks_generate_what_one_module_does(tmp_path):
    save_tiny("llama", tmp_path)
    for same, difference, far in ranks.run_ranks(2, of_rank, str(tmp_path), limit=90):
        assert same and difference < 1e-4 and far == "no error"          # as many tokens as the context holds


def test_a_module_that_transformers_read_from_a_gguf_file():
    from transformers import AutoModelForCausalLM
    path = smollm2_path()
    module = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32).eval()
    origin = module.hf_quantizer
    ids = torch.tensor([[504, 3575, 282, 4649, 314]])                    # The capital of France is
    plain = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    wanted = module.generate(ids, **plain)
    engine = deepspeed.init_inference(module, dtype=torch.float32, replace_with_kernel_inject=True)
    assert torch.equal(engine.generate(ids, **plain), wanted)
    assert module.hf_quantizer is origin and module.config.quantization_config.quant_method == "gguf"
