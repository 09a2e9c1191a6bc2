// GGUF's metadata: one set of keys under the architecture's name, one set of tensor names for all.
#include <algorithm>
#include <cmath>
#include <set>

#include "inference/model/families.h"

namespace unshard::inference {
namespace {

TensorNames gguf_names() {
  const std::string layer = "blk.{}.";
  TensorNames names;
  names.embedding = "token_embd";
  names.final_norm = "output_norm";
  names.output = "output";
  names.attention_norm = layer + "attn_norm";
  names.q = layer + "attn_q";
  names.k = layer + "attn_k";
  names.v = layer + "attn_v";
  names.attention_output = layer + "attn_output";
  names.mlp_norm = layer + "ffn_norm";
  names.gate = layer + "ffn_gate";
  names.up = layer + "ffn_up";
  names.down = layer + "ffn_down";
  return names;
}

void read_rope(const Settings& metadata, const std::string& arch, ModelConfig& model) {
  model.rope.theta = metadata.get<double>(arch + ".rope.freq_base", 10000);
  model.rope.rotary = metadata.size_or(arch + ".rope.dimension_count", model.head_size);
  const auto kind = metadata.get<std::string>(arch + ".rope.scaling.type", "none");
  if (kind == "none") return;
  if (kind != "linear" && kind != "yarn") metadata.fail(arch + ".rope.scaling.type", "none, linear and yarn are known");
  model.rope.kind = kind == "linear" ? RopeKind::linear : RopeKind::yarn;
  model.rope.factor = metadata.get<double>(arch + ".rope.scaling.factor", 1);
  model.rope.original_context = metadata.size_or(arch + ".rope.scaling.original_context_length", model.context, 1);
}

void read_experts(const Settings& metadata, const std::string& arch, ModelConfig& model) {
  model.experts.experts = metadata.size_or(arch + ".expert_count", 0);
  if (model.experts.experts == 0) return;
  model.experts.chosen = metadata.size(arch + ".expert_used_count");
  model.experts.intermediate = metadata.size_or(arch + ".expert_feed_forward_length", model.intermediate, 1);
  model.experts.normalise = arch != "qwen2moe";
  model.names.router = "blk.{}.ffn_gate_inp";
  model.names.expert_gate = "blk.{}.ffn_gate_exps";
  model.names.expert_up = "blk.{}.ffn_up_exps";
  model.names.expert_down = "blk.{}.ffn_down_exps";
  if (arch != "qwen2moe") return;
  model.experts.shared_intermediate = metadata.size(arch + ".expert_shared_feed_forward_length");
  model.names.shared_gate = "blk.{}.ffn_gate_shexp";
  model.names.shared_up = "blk.{}.ffn_up_shexp";
  model.names.shared_down = "blk.{}.ffn_down_shexp";
  model.names.shared_switch = "blk.{}.ffn_gate_inp_shexp";
}

}  // namespace

ModelConfig config_from_gguf(const Settings& metadata) {
  static const std::set<std::string> known = {"llama", "qwen2", "qwen3", "qwen2moe", "qwen3moe"};
  const auto arch = metadata.get<std::string>("general.architecture");
  if (!known.contains(arch))
    metadata.fail("general.architecture",
                  "GGUF files of llama (Llama, SmolLM2, Mistral, Mixtral), qwen2, qwen3, qwen2moe and qwen3moe can be read");
  ModelConfig model;
  model.family = arch;
  model.names = gguf_names();
  model.hidden = metadata.size(arch + ".embedding_length");
  model.layers = metadata.size(arch + ".block_count");
  model.heads = metadata.size(arch + ".attention.head_count");
  model.kv_heads = metadata.size_or(arch + ".attention.head_count_kv", model.heads, 1);
  model.head_size = metadata.size_or(arch + ".attention.key_length", model.hidden / model.heads, 1);
  model.intermediate = metadata.size_or(arch + ".feed_forward_length", 0);
  model.context = metadata.size(arch + ".context_length");
  model.norm_eps = metadata.get<float>(arch + ".attention.layer_norm_rms_epsilon", 1e-5f);
  model.window = metadata.size_or(arch + ".attention.sliding_window", 0);
  model.interleaved_qk = arch == "llama";
  if (arch.starts_with("qwen3")) model.names.q_norm = "blk.{}.attn_q_norm", model.names.k_norm = "blk.{}.attn_k_norm";
  read_rope(metadata, arch, model);
  read_experts(metadata, arch, model);
  model.vocab = metadata.size_or(arch + ".vocab_size", 0);  // else as many as the embedding has rows
  for (const char* key : {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"}) {
    if (!metadata.has(key)) continue;
    const auto token = metadata.get<Token>(key);
    if (std::find(model.end_tokens.begin(), model.end_tokens.end(), token) == model.end_tokens.end()) model.end_tokens.push_back(token);
  }
  check_config(model, metadata.file());
  return model;
}

}  // namespace unshard::inference
