#include <cmath>
#include <map>

#include "inference/encoder/encoder_config.h"

namespace unshard::inference {
namespace {

Gate activation_of(const Settings& config, const std::string& key) {
  static const std::map<std::string, Gate> known = {
      {"gelu", Gate::gelu}, {"gelu_new", Gate::gelu_tanh}, {"gelu_pytorch_tanh", Gate::gelu_tanh}, {"gelu_fast", Gate::gelu_tanh}};
  const auto found = known.find(config.get<std::string>(key, "gelu"));
  if (found == known.end()) config.fail(key, "gelu, gelu_new, gelu_fast and gelu_pytorch_tanh are known");
  return found->second;
}

EncoderNames bert_names() {
  const std::string layer = "encoder.layer.{}.";
  return {.words = "embeddings.word_embeddings",
          .positions = "embeddings.position_embeddings",
          .types = "embeddings.token_type_embeddings",
          .embedding_norm = "embeddings.LayerNorm",
          .q = layer + "attention.self.query",
          .k = layer + "attention.self.key",
          .v = layer + "attention.self.value",
          .attention_output = layer + "attention.output.dense",
          .attention_norm = layer + "attention.output.LayerNorm",
          .up = layer + "intermediate.dense",
          .down = layer + "output.dense",
          .output_norm = layer + "output.LayerNorm"};
}

EncoderConfig bert(const Settings& config) {
  EncoderConfig model;
  model.prefix = "bert.";
  model.names = bert_names();
  model.vocab = config.size("vocab_size");
  model.hidden = config.size("hidden_size");
  model.layers = config.size("num_hidden_layers");
  model.heads = config.size("num_attention_heads");
  model.intermediate = config.size("intermediate_size");
  model.positions = config.size("max_position_embeddings");
  model.types = config.size_or("type_vocab_size", 2);
  model.norm_eps = config.get<float>("layer_norm_eps", 1e-12f);
  model.activation = activation_of(config, "hidden_act");
  if (config.get<std::string>("position_embedding_type", "absolute") != "absolute")
    config.fail("position_embedding_type", "not built; only absolute is");
  for (const auto* key : {"is_decoder", "add_cross_attention"})
    if (config.get<bool>(key, false)) config.fail(key, "not built; only false is");
  return model;
}

/// Positions count from the padding token's number on.
EncoderConfig roberta(const Settings& config) {
  auto model = bert(config);
  model.prefix = "roberta.";
  model.first_position = config.size_or("pad_token_id", 1) + 1;
  if (model.first_position >= model.positions)
    config.fail("pad_token_id", cat("a token below the ", model.positions, " positions is wanted"));
  model.padding = static_cast<Token>(model.first_position - 1);
  return model;
}

EncoderConfig distilbert(const Settings& config) {
  EncoderConfig model;
  model.prefix = "distilbert.";
  const std::string layer = "transformer.layer.{}.";
  model.names = {.words = "embeddings.word_embeddings",
                 .positions = "embeddings.position_embeddings",
                 .types = "",
                 .embedding_norm = "embeddings.LayerNorm",
                 .q = layer + "attention.q_lin",
                 .k = layer + "attention.k_lin",
                 .v = layer + "attention.v_lin",
                 .attention_output = layer + "attention.out_lin",
                 .attention_norm = layer + "sa_layer_norm",
                 .up = layer + "ffn.lin1",
                 .down = layer + "ffn.lin2",
                 .output_norm = layer + "output_layer_norm"};
  model.vocab = config.size("vocab_size");
  model.hidden = config.size("dim");
  model.layers = config.size("n_layers");
  model.heads = config.size("n_heads");
  model.intermediate = config.size("hidden_dim");
  model.positions = config.size("max_position_embeddings");
  model.activation = activation_of(config, "activation");
  return model;
}

const std::map<std::string, EncoderConfig (*)(const Settings&)>& families() {
  static const std::map<std::string, EncoderConfig (*)(const Settings&)> all = {
      {"bert", bert}, {"roberta", roberta}, {"xlm-roberta", roberta}, {"camembert", roberta}, {"distilbert", distilbert}};
  return all;
}

}  // namespace

bool is_encoder_family(const std::string& model_type) { return families().contains(model_type); }

EncoderConfig encoder_config(const Settings& config) {
  const auto family = config.get<std::string>("model_type");
  const auto found = families().find(family);
  if (found == families().end()) {
    std::string known;
    for (const auto& [name, unused] : families()) known += (known.empty() ? "" : ", ") + name;
    throw ModelError(cat(config.file(), ": embeddings of models of type '", family, "' aren't built; those of ", known, " are"));
  }
  if (config.has("quantization_config"))
    config.fail("quantization_config", "weights quantised by another library can't be read; dtype int8 or int4 quantises here");
  auto model = found->second(config);
  model.family = family;
  if (model.hidden % model.heads != 0)
    throw ModelError(cat(config.file(), ": ", model.heads, " heads can't share ", model.hidden, " features evenly"));
  if (!(model.norm_eps >= 0) || !std::isfinite(model.norm_eps))
    throw ModelError(cat(config.file(), ": 'layer_norm_eps' is ", model.norm_eps, ", which a norm can't have"));
  return model;
}

}  // namespace unshard::inference
