// A mixture of experts: each token's rows go to the experts that its router likes best. Source: Mixtral (arXiv 2401.04088), Qwen2-MoE.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "inference/model/decoder.h"

namespace unshard::inference {
namespace {

struct Visit {
  std::int64_t token;
  float weight;
};

/// Softmax over all experts, the best `chosen` of them, renormalised where the family does. Ties: the lower expert.
void route(const float* scores, const ExpertConfig& config, std::int64_t token, std::vector<std::vector<Visit>>& visits) {
  const auto experts = static_cast<std::size_t>(config.experts);
  std::vector<float> share(scores, scores + experts);
  const float most = *std::max_element(share.begin(), share.end());
  float sum = 0;
  for (auto& value : share) sum += value = std::exp(value - most);
  std::vector<std::size_t> order(experts);
  std::iota(order.begin(), order.end(), std::size_t{0});
  const auto chosen = order.begin() + config.chosen;
  std::partial_sort(order.begin(), chosen, order.end(), [&](auto a, auto b) { return share[a] != share[b] ? share[a] > share[b] : a < b; });
  float kept = 0;
  for (auto at = order.begin(); at != chosen; ++at) kept += share[*at];
  for (auto at = order.begin(); at != chosen; ++at) visits[*at].push_back({token, share[*at] / (config.normalise ? kept : sum)});
}

}  // namespace

void Decoder::mixture(const ExpertWeights& weights, std::int64_t tokens, float* out) {
  const auto& config = config_.experts;
  const auto width = static_cast<std::size_t>(config_.hidden);
  std::vector<float> scores(static_cast<std::size_t>(tokens * config.experts)), rows, results;
  in_.assign(normed_.data(), tokens, config_.hidden, config_.hidden, WeightType::f32, workers_);
  multiply(weights.router.matrix, in_, scores.data(), config.experts, {}, workers_);
  std::vector<std::vector<Visit>> visits(static_cast<std::size_t>(config.experts));
  for (std::int64_t t = 0; t < tokens; ++t) route(scores.data() + t * config.experts, config, t, visits);

  std::fill(out, out + static_cast<std::size_t>(tokens) * width, 0.0f);
  const auto visit = [&](const MlpWeights& expert, const std::vector<Visit>& guests) {
    rows.resize(guests.size() * width);
    results.resize(rows.size());
    for (std::size_t i = 0; i < guests.size(); ++i)
      std::memcpy(rows.data() + i * width, normed_.data() + static_cast<std::size_t>(guests[i].token) * width, width * sizeof(float));
    const auto count = static_cast<std::int64_t>(guests.size());
    in_.assign(rows.data(), count, config_.hidden, config_.hidden, expert.in.matrix.type(), workers_);
    mlp(expert, in_, results.data(), false, count);
    for (std::size_t i = 0; i < guests.size(); ++i)
      for (std::size_t d = 0; d < width; ++d)
        out[static_cast<std::size_t>(guests[i].token) * width + d] += guests[i].weight * results[i * width + d];
  };
  for (std::size_t e = 0; e < visits.size(); ++e)
    if (!visits[e].empty()) visit(weights.experts[e], visits[e]);

  if (config.shared_intermediate == 0) return;
  std::vector<float> switches(static_cast<std::size_t>(tokens));
  in_.assign(normed_.data(), tokens, config_.hidden, config_.hidden, WeightType::f32, workers_);
  multiply(weights.shared_switch.matrix, in_, switches.data(), 1, {}, workers_);
  std::vector<Visit> all;
  for (std::int64_t t = 0; t < tokens; ++t) all.push_back({t, 1 / (1 + std::exp(-switches[static_cast<std::size_t>(t)]))});
  visit(weights.shared, all);
}

}  // namespace unshard::inference
