#include "inference/model/families.h"

#include <algorithm>
#include <cmath>
#include <map>

namespace unshard::inference {
namespace {

TensorNames llama_names() {
  const std::string layer = "model.layers.{}.";
  TensorNames names;
  names.embedding = "model.embed_tokens";
  names.final_norm = "model.norm";
  names.output = "lm_head";
  names.attention_norm = layer + "input_layernorm";
  names.q = layer + "self_attn.q_proj";
  names.k = layer + "self_attn.k_proj";
  names.v = layer + "self_attn.v_proj";
  names.attention_output = layer + "self_attn.o_proj";
  names.mlp_norm = layer + "post_attention_layernorm";
  names.gate = layer + "mlp.gate_proj";
  names.up = layer + "mlp.up_proj";
  names.down = layer + "mlp.down_proj";
  return names;
}

Gate activation_of(const Settings& config, const std::string& key, const std::string& otherwise) {
  static const std::map<std::string, Gate> known = {{"silu", Gate::silu},
                                                    {"swish", Gate::silu},
                                                    {"gelu", Gate::gelu},
                                                    {"gelu_new", Gate::gelu_tanh},
                                                    {"gelu_pytorch_tanh", Gate::gelu_tanh},
                                                    {"gelu_fast", Gate::gelu_tanh}};
  const auto found = known.find(config.get<std::string>(key, otherwise));
  if (found == known.end()) config.fail(key, "silu, gelu, gelu_new and gelu_pytorch_tanh are known");
  return found->second;
}

void read_scaling(const Settings& rope, std::int64_t context, RopeConfig& out) {
  const std::string kind = rope.get<std::string>("rope_type", rope.get<std::string>("type", "default"));
  // dynamic changes frequencies only beyond max_position_embeddings, where every text ends here. su: longrope's first name.
  static const std::map<std::string, RopeKind> known = {
      {"default", RopeKind::plain}, {"dynamic", RopeKind::plain}, {"su", RopeKind::longrope},      {"linear", RopeKind::linear},
      {"llama3", RopeKind::llama3}, {"yarn", RopeKind::yarn},     {"longrope", RopeKind::longrope}};
  const auto found = known.find(kind);
  if (found == known.end())
    throw ModelError(cat(rope.file(), ": rope scaling '", kind, "' isn't known; default, linear, dynamic, llama3, yarn and longrope are"));
  out.kind = found->second;
  out.original_context = rope.size_or("original_max_position_embeddings", out.original_context > 0 ? out.original_context : context, 1);
  const bool derived = out.kind == RopeKind::yarn || out.kind == RopeKind::longrope;
  out.factor = rope.get<double>("factor", derived ? static_cast<double>(context) / static_cast<double>(out.original_context) : 1.0);
  out.low_factor = rope.get<double>("low_freq_factor", 1.0);
  out.high_factor = rope.get<double>("high_freq_factor", 4.0);
  out.beta_fast = rope.get<double>("beta_fast", 32.0);
  out.beta_slow = rope.get<double>("beta_slow", 1.0);
  out.attention_factor = rope.get<double>("attention_factor", 0.0);
  out.mscale = rope.get<double>("mscale", 0.0);
  out.mscale_all_dim = rope.get<double>("mscale_all_dim", 0.0);
  out.truncate = rope.get<bool>("truncate", true);
  out.short_factors = rope.get<std::vector<double>>("short_factor", {});
  out.long_factors = rope.get<std::vector<double>>("long_factor", {});
  const auto half = static_cast<std::size_t>(out.rotary / 2);
  if (out.kind == RopeKind::longrope && (out.short_factors.size() != half || out.long_factors.size() != half))
    rope.fail("short_factor", cat("short_factor and long_factor have ", half, " numbers each in longrope"));
}

/// What a family takes where config.json doesn't say, as transformers does.
struct Defaults {
  float norm_eps = 1e-6f;
  double theta = 10000;
  double rotary_part = 0;      ///< of a head's features; 0: all, whatever the file says
  std::int64_t head_size = 0;  ///< 0: hidden / heads
};

/// transformers 5 writes `rope_parameters`; before, `rope_theta` and `rope_scaling` stood beside each other.
RopeConfig read_rope(const Settings& config, const Settings& parameters, const ModelConfig& model, const Defaults& otherwise) {
  RopeConfig rope;
  rope.theta = parameters.get<double>("rope_theta", config.get<double>("rope_theta", otherwise.theta));
  const double part =
      otherwise.rotary_part == 0
          ? 1.0
          : parameters.get<double>("partial_rotary_factor", config.get<double>("partial_rotary_factor", otherwise.rotary_part));
  rope.rotary = static_cast<std::int64_t>(static_cast<double>(model.head_size) * part);
  rope.original_context = config.size_or("original_max_position_embeddings", 0);
  read_scaling(parameters.has("rope_theta") || parameters.has("rope_type") ? parameters : config.section("rope_scaling"), model.context,
               rope);
  return rope;
}

/// null is said too: of a window or a soft cap, that there is none.
bool says(const Settings& config, const std::string& key) { return config.json().contains(key); }

std::int64_t window_size(const Settings& config, std::int64_t otherwise) {
  return says(config, "sliding_window") ? config.size_or("sliding_window", 0) : otherwise;
}

void read_window(const Settings& config, bool used, ModelConfig& model, std::int64_t otherwise = 0) {
  model.window = used ? window_size(config, otherwise) : 0;
  if (model.window == 0 || !config.has("layer_types")) return;
  for (const auto& kind : config.get<std::vector<std::string>>("layer_types")) {
    if (kind != "sliding_attention" && kind != "full_attention")
      config.fail("layer_types", "sliding_attention and full_attention are known");
    model.windowed.push_back(kind == "sliding_attention");
  }
}

/// What most families share.
ModelConfig llama_like(const Settings& config, const Defaults& otherwise) {
  ModelConfig model;
  model.names = llama_names();
  model.vocab = config.size("vocab_size");
  model.hidden = config.size("hidden_size");
  model.layers = config.size("num_hidden_layers");
  model.heads = config.size("num_attention_heads");
  model.kv_heads = config.size_or("num_key_value_heads", model.heads, 1);
  model.head_size = config.size_or("head_dim", otherwise.head_size > 0 ? otherwise.head_size : model.hidden / model.heads, 1);
  model.intermediate = config.size("intermediate_size");
  model.context = config.size("max_position_embeddings");
  model.norm_eps = config.get<float>("rms_norm_eps", otherwise.norm_eps);
  model.activation = activation_of(config, config.has("hidden_activation") ? "hidden_activation" : "hidden_act", "silu");
  model.rope = read_rope(config, config.section("rope_parameters"), model, otherwise);
  return model;
}

ModelConfig llama(const Settings& config) { return llama_like(config, {}); }

ModelConfig mistral(const Settings& config) {
  auto model = llama_like(config, {});
  model.window = window_size(config, 4096);
  return model;
}

ModelConfig qwen2_like(const Settings& config, const Defaults& otherwise) {
  auto model = llama_like(config, otherwise);
  read_window(config, config.get<bool>("use_sliding_window", false), model);
  if (model.window == 0 || config.has("layer_types")) return model;
  const auto first = config.size_or("max_window_layers", 28);  // configs of before layer_types
  for (std::int64_t i = 0; i < model.layers; ++i) model.windowed.push_back(i >= first);
  return model;
}

ModelConfig qwen2(const Settings& config) { return qwen2_like(config, {}); }

ModelConfig qwen3_like(const Settings& config, const Defaults& otherwise) {
  auto model = qwen2_like(config, otherwise);
  model.names.q_norm = "model.layers.{}.self_attn.q_norm";
  model.names.k_norm = "model.layers.{}.self_attn.k_norm";
  return model;
}

ModelConfig qwen3(const Settings& config) { return qwen3_like(config, {.head_size = 128}); }

void qwen_experts(const Settings& config, ModelConfig& model) {
  const std::string mlp = "model.layers.{}.mlp.";
  auto& experts = model.experts;
  experts.experts = config.size(config.has("num_local_experts") ? "num_local_experts" : "num_experts");  // transformers 5 has both names
  experts.chosen = config.size("num_experts_per_tok");
  experts.intermediate = config.size("moe_intermediate_size");
  experts.shared_intermediate = config.size_or("shared_expert_intermediate_size", 0);
  experts.normalise = config.get<bool>("norm_topk_prob", false);
  const auto step = config.size_or("decoder_sparse_step", 1, 1);
  experts.dense_layers.resize(static_cast<std::size_t>(model.layers));
  for (std::int64_t i = 0; i < model.layers; ++i) experts.dense_layers[static_cast<std::size_t>(i)] = (i + 1) % step != 0;
  for (const auto layer : config.get<std::vector<std::int64_t>>("mlp_only_layers", {}))
    if (layer >= 0 && layer < model.layers) experts.dense_layers[static_cast<std::size_t>(layer)] = true;
  model.names.router = mlp + "gate";
  model.names.expert_gate = mlp + "experts.{e}.gate_proj";
  model.names.expert_up = mlp + "experts.{e}.up_proj";
  model.names.expert_down = mlp + "experts.{e}.down_proj";
  if (experts.shared_intermediate == 0) return;
  model.names.shared_gate = mlp + "shared_expert.gate_proj";
  model.names.shared_up = mlp + "shared_expert.up_proj";
  model.names.shared_down = mlp + "shared_expert.down_proj";
  model.names.shared_switch = mlp + "shared_expert_gate";
}

ModelConfig qwen2_moe(const Settings& config) {
  auto model = qwen2(config);
  qwen_experts(config, model);
  if (model.window == 0 || config.has("layer_types")) return model;
  const auto end = config.size_or("max_window_layers", 28);  // as transformers derives layer_types for this family
  for (std::int64_t i = 0; i < model.layers; ++i) model.windowed[static_cast<std::size_t>(i)] = i % 2 == 0 && i < end;
  return model;
}

ModelConfig qwen3_moe(const Settings& config) {
  auto model = qwen3_like(config, {});
  qwen_experts(config, model);
  model.experts.shared_intermediate = 0;
  model.windowed.clear();  // the family knows no kinds of layers: all have the window
  return model;
}

ModelConfig mixtral(const Settings& config) {
  auto model = llama_like(config, {.norm_eps = 1e-5f, .theta = 1e6});
  model.window = config.size_or("sliding_window", 0);
  model.experts.experts = config.size("num_local_experts");
  model.experts.chosen = config.size("num_experts_per_tok");
  model.experts.intermediate = model.intermediate;
  const std::string moe = "model.layers.{}.block_sparse_moe.";
  model.names.router = moe + "gate";
  model.names.expert_gate = moe + "experts.{e}.w1";
  model.names.expert_up = moe + "experts.{e}.w3";
  model.names.expert_down = moe + "experts.{e}.w2";
  return model;
}

ModelConfig gpt2(const Settings& config) {
  ModelConfig model;
  model.vocab = config.size("vocab_size");
  model.hidden = config.size("n_embd");
  model.layers = config.size("n_layer");
  model.heads = model.kv_heads = config.size("n_head");
  model.head_size = model.hidden / model.heads;
  model.intermediate = config.size_or("n_inner", 4 * model.hidden, 1);
  model.context = config.size("n_positions");
  model.norm = NormKind::layer;
  model.norm_eps = config.get<float>("layer_norm_epsilon", 1e-5f);
  model.rope.kind = RopeKind::none;
  model.learned_positions = model.transposed = true;
  model.gated = false;
  model.activation = activation_of(config, "activation_function", "gelu_new");
  if (!config.get<bool>("scale_attn_weights", true)) model.attention_scale = 1;
  if (config.get<bool>("scale_attn_by_inverse_layer_idx", false))
    config.fail("scale_attn_by_inverse_layer_idx", "not built; only false is");
  const std::string layer = "h.{}.";
  model.names.embedding = "wte";
  model.names.positions = "wpe";
  model.names.final_norm = "ln_f";
  model.names.output = "lm_head";
  model.names.attention_norm = layer + "ln_1";
  model.names.qkv = layer + "attn.c_attn";
  model.names.attention_output = layer + "attn.c_proj";
  model.names.mlp_norm = layer + "ln_2";
  model.names.up = layer + "mlp.c_fc";
  model.names.down = layer + "mlp.c_proj";
  return model;
}

ModelConfig gemma_like(const Settings& config, const std::string& activation) {
  auto model = llama_like(config, {.head_size = 256});
  model.norm_offset = 1;
  model.embedding_scale = std::sqrt(static_cast<float>(model.hidden));
  model.activation = activation_of(config, activation, "gelu_pytorch_tanh");
  return model;
}

ModelConfig gemma(const Settings& config) {
  auto model = gemma_like(config, "hidden_act");
  if (model.activation == Gate::gelu) model.activation = Gate::gelu_tanh;  // the first configs named the wrong one
  return model;
}

/// A number, none where null is said.
float cap_of(const Settings& config, const std::string& key, float otherwise) {
  return config.get<float>(key, says(config, key) ? 0 : otherwise);
}

ModelConfig gemma2(const Settings& config) {
  auto model = gemma_like(config, "hidden_activation");
  read_window(config, true, model, 4096);
  if (model.windowed.empty())
    for (std::int64_t i = 0; i < model.layers; ++i) model.windowed.push_back(i % 2 == 0);
  model.attention_scale = 1 / std::sqrt(config.get<float>("query_pre_attn_scalar", 256));
  model.attention_softcap = cap_of(config, "attn_logit_softcapping", 50);
  model.logit_softcap = cap_of(config, "final_logit_softcapping", 30);
  model.names.post_attention_norm = "model.layers.{}.post_attention_layernorm";
  model.names.mlp_norm = "model.layers.{}.pre_feedforward_layernorm";
  model.names.post_mlp_norm = "model.layers.{}.post_feedforward_layernorm";
  return model;
}

ModelConfig gemma3(const Settings& config) {
  auto model = gemma2(config);
  model.attention_softcap = 0;  // this family has none, whatever the file says
  model.logit_softcap = cap_of(config, "final_logit_softcapping", 0);
  if (config.get<bool>("use_bidirectional_attention", false)) config.fail("use_bidirectional_attention", "not built; only false is");
  if (!config.has("layer_types")) {  // configs of before it
    const auto pattern = config.size_or("sliding_window_pattern", 6, 1);
    for (std::int64_t i = 0; i < model.layers; ++i) model.windowed[static_cast<std::size_t>(i)] = (i + 1) % pattern != 0;
  }
  model.names.q_norm = "model.layers.{}.self_attn.q_norm";
  model.names.k_norm = "model.layers.{}.self_attn.k_norm";
  const auto parameters = config.section("rope_parameters");
  model.has_local_rope = true;
  if (parameters.has("full_attention")) {
    model.rope = read_rope(config, parameters.section("full_attention"), model, {.theta = 1e6});
    model.local_rope = read_rope(config, parameters.section("sliding_attention"), model, {.theta = 1e4});
    return model;
  }
  model.rope = read_rope(config, parameters, model, {.theta = 1e6});
  model.local_rope = model.rope;
  model.local_rope.kind = RopeKind::plain;
  model.local_rope.theta = config.get<double>("rope_local_base_freq", 1e4);
  return model;
}

ModelConfig phi3(const Settings& config) {
  auto model = llama_like(config, {.norm_eps = 1e-5f, .rotary_part = 1});
  model.window = config.size_or("sliding_window", 0);
  model.names.q = model.names.k = model.names.v = "";
  model.names.qkv = "model.layers.{}.self_attn.qkv_proj";
  model.names.gate = model.names.up = "";
  model.names.gate_up = "model.layers.{}.mlp.gate_up_proj";
  return model;
}

ModelConfig phi(const Settings& config) {
  auto model = llama_like(config, {.rotary_part = 0.5});
  if (config.get<bool>("qk_layernorm", false)) config.fail("qk_layernorm", "not built; only false is");
  model.norm = NormKind::layer;
  model.norm_eps = config.get<float>("layer_norm_eps", 1e-5f);
  model.activation = activation_of(config, "hidden_act", "gelu_new");
  model.gated = false;
  model.names.final_norm = "model.final_layernorm";
  model.names.attention_output = "model.layers.{}.self_attn.dense";
  model.names.mlp_norm = model.names.gate = "";
  model.names.up = "model.layers.{}.mlp.fc1";
  model.names.down = "model.layers.{}.mlp.fc2";
  return model;
}

const std::map<std::string, ModelConfig (*)(const Settings&)>& families() {
  static const std::map<std::string, ModelConfig (*)(const Settings&)> all = {
      {"llama", llama}, {"mistral", mistral}, {"qwen2", qwen2},         {"qwen3", qwen3},
      {"gpt2", gpt2},   {"mixtral", mixtral}, {"qwen2_moe", qwen2_moe}, {"qwen3_moe", qwen3_moe},
      {"gemma", gemma}, {"gemma2", gemma2},   {"gemma3_text", gemma3},  {"phi3", phi3},
      {"phi", phi}};
  return all;
}

void add_tokens(const Settings& from, const std::string& key, std::vector<Token>& tokens) {
  if (!from.has(key)) return;
  const auto& given = from.json().at(key);
  const auto several = given.is_array() ? given : nlohmann::json::array({given});
  std::vector<Token> more;
  for (const auto& each : several) {
    if (!each.is_number_integer() || !std::in_range<Token>(each.get<std::int64_t>())) from.fail(key, "tokens are whole numbers below 2^31");
    more.push_back(each.get<Token>());
  }
  for (const auto token : more)
    if (std::find(tokens.begin(), tokens.end(), token) == tokens.end()) tokens.push_back(token);
}

}  // namespace

ModelConfig config_from_hugging_face(const Settings& config, const Settings& generation) {
  const auto family = config.get<std::string>("model_type");
  const auto found = families().find(family);
  if (found == families().end()) {
    std::string known;
    for (const auto& [name, unused] : families()) known += (known.empty() ? "" : ", ") + name;
    throw ModelError(cat(config.file(), ": models of type '", family, "' aren't built; ", known, " are"));
  }
  if (config.has("quantization_config"))
    config.fail("quantization_config", "weights quantised by another library can't be read; GGUF files can");
  auto model = found->second(config);
  model.family = family;
  add_tokens(generation, "eos_token_id", model.end_tokens);
  if (model.end_tokens.empty()) add_tokens(config, "eos_token_id", model.end_tokens);
  model.untied = !config.get<bool>("tie_word_embeddings", true);
  check_config(model, config.file());
  return model;
}

void check_config(const ModelConfig& config, const std::string& file) {
  const auto wrong = [&](const std::string& what) { throw ModelError(cat(file, ": ", what)); };
  if (!config.gated && config.activation == Gate::silu) wrong("an MLP without a gate has gelu here, not silu");
  if (config.heads % config.kv_heads != 0) wrong(cat(config.heads, " heads can't share ", config.kv_heads, " key-value heads evenly"));
  const auto check_rope = [&](const RopeConfig& rope) {
    if (rope.kind != RopeKind::none && (rope.rotary <= 0 || rope.rotary % 2 != 0 || rope.rotary > config.head_size))
      wrong(cat(rope.rotary, " rotated features of a head of ", config.head_size, " can't be"));
  };
  check_rope(config.rope);
  if (config.has_local_rope) check_rope(config.local_rope);
  if (config.interleaved_qk && config.rope.rotary != config.head_size)
    wrong(cat("rotating ", config.rope.rotary, " of a head's ", config.head_size, " features isn't built for rows in pairs"));
  if (!config.windowed.empty() && static_cast<std::int64_t>(config.windowed.size()) != config.layers)
    wrong(cat("kinds of ", config.windowed.size(), " layers for ", config.layers, " layers"));
  for (const auto& rope : {config.rope, config.local_rope})
    if (!(rope.theta > 0) || !(rope.factor > 0) || !std::isfinite(rope.theta) || !std::isfinite(rope.factor))
      wrong(cat("rope with theta ", rope.theta, " and factor ", rope.factor, " can't be"));
  if (!(config.norm_eps >= 0) || !std::isfinite(config.attention_scale) || !std::isfinite(config.attention_softcap) ||
      !std::isfinite(config.logit_softcap))
    wrong("a norm's epsilon, the attention's scale or a soft cap isn't a number that can be used");
  if (config.experts.chosen > config.experts.experts)
    wrong(cat(config.experts.chosen, " of ", config.experts.experts, " experts can't be chosen"));
}

}  // namespace unshard::inference
