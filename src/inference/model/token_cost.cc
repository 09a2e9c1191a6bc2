#include "inference/model/token_cost.h"

namespace unshard::inference {
namespace {

/// Multiplications of a token with the matrices of all layers.
std::int64_t matrix_products(const ModelConfig& c) {
  const std::int64_t attention = c.hidden * c.head_size * 2 * (c.heads + c.kv_heads), matrices = c.gated ? 3 : 2;
  const auto mlp = [&](std::int64_t inner) { return matrices * c.hidden * inner; };
  std::int64_t all = c.layers * attention;
  for (std::int64_t layer = 0; layer < c.layers; ++layer) {
    all += c.experts.in_layer(layer) ? mlp(c.experts.chosen * c.experts.intermediate + c.experts.shared_intermediate) : mlp(c.intermediate);
  }
  return all;
}

/// Layers that look back on everything.
std::int64_t whole_layers(const ModelConfig& c) {
  std::int64_t whole = 0;
  for (std::int64_t layer = 0; layer < c.layers; ++layer) whole += c.window_of(layer) == 0;
  return whole;
}

}  // namespace

std::int64_t look_back_tokens(const ModelConfig& config) {
  const std::int64_t products_5 = 5 * config.heads * config.head_size * whole_layers(config);  // 2.5 times those with keys and values
  return products_5 == 0 ? 0 : matrix_products(config) / products_5;
}

}  // namespace unshard::inference
