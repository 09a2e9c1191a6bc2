#pragma once
// For tests only: the note in sampler.cc again, plainly and in double precision, and the chi-square test against it.
#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <set>
#include <vector>

#include "inference/sample/sampler.h"

namespace unshard::inference {

/// Steps 1 and 2.
inline std::vector<double> adjusted(std::vector<float> logits, const SamplingOptions& o, const std::vector<Token>& prompt,
                                    const std::vector<Token>& output) {
  std::vector<double> x(logits.begin(), logits.end());
  for (const auto& [token, bias] : o.logit_bias) x[static_cast<std::size_t>(token)] += bias;
  std::set<Token> seen(prompt.begin(), prompt.end());
  seen.insert(output.begin(), output.end());
  for (const Token token : seen) {
    double& logit = x[static_cast<std::size_t>(token)];
    logit = logit > 0 ? logit / o.repetition_penalty : logit * o.repetition_penalty;
  }
  std::map<Token, int> counts;
  for (const Token token : output) ++counts[token];
  for (const auto& [token, count] : counts) x[static_cast<std::size_t>(token)] -= o.frequency_penalty * count + o.presence_penalty;
  return x;
}

/// Steps 4 to 8 for a temperature above 0.
inline std::vector<double> exact_distribution(const std::vector<double>& x, const SamplingOptions& o, const std::vector<bool>& allowed) {
  std::vector<std::size_t> order;
  for (std::size_t i = 0; i < x.size(); ++i) {
    if (allowed.empty() || allowed[i]) order.push_back(i);
  }
  std::ranges::stable_sort(order, [&](std::size_t a, std::size_t b) { return x[a] > x[b]; });
  if (o.top_k > 0 && order.size() > static_cast<std::size_t>(o.top_k)) order.resize(static_cast<std::size_t>(o.top_k));
  const double largest = x[order[0]];
  std::vector<double> p(x.size());
  const auto normalise = [&] {
    double sum = 0;
    for (const auto i : order) sum += p[i];
    for (auto& each : p) each /= sum;
  };
  for (const auto i : order) p[i] = std::exp((x[i] - largest) / o.temperature);
  normalise();
  const auto cut = [&](std::size_t kept) {
    for (std::size_t i = kept; i < order.size(); ++i) p[order[i]] = 0;
    order.resize(kept);
  };
  std::size_t kept = 0;
  for (double sum = 0; kept < order.size() && (kept == 0 || sum < o.top_p); ++kept) sum += p[order[kept]];
  if (o.top_p < 1) cut(kept);
  const double least = o.min_p * p[order[0]];
  for (kept = 0; kept < order.size() && p[order[kept]] >= least; ++kept) {
  }
  cut(kept);
  normalise();
  return p;
}

/// How many standard deviations the chi-square statistic of `counts` lies above what the distribution `p` makes likely (Wilson and
/// Hilferty's normal approximation); bins of fewer than 5 expected are put together. Infinite if something impossible was counted.
inline double chi_square_deviation(const std::vector<std::int64_t>& counts, const std::vector<double>& p) {
  const auto draws = static_cast<double>(std::accumulate(counts.begin(), counts.end(), std::int64_t{0}));
  double statistic = 0, expected = 0, counted = 0;
  int bins = 0;
  double last_expected = 0, last_counted = 0;
  const auto close = [&] {
    statistic += (counted - expected) * (counted - expected) / expected;
    ++bins;
    last_expected = expected;
    last_counted = counted;
    expected = counted = 0;
  };
  for (std::size_t i = 0; i < p.size(); ++i) {
    if (p[i] == 0 && counts[i] > 0) return std::numeric_limits<double>::infinity();
    expected += p[i] * draws;
    counted += static_cast<double>(counts[i]);
    if (expected >= 5) close();
  }
  if (expected > 0 && bins > 0) {  // the rest joins the last bin
    statistic -= (last_counted - last_expected) * (last_counted - last_expected) / last_expected;
    --bins;
    expected += last_expected;
    counted += last_counted;
    close();
  }
  if (bins < 2) return 0;
  const double freedom = bins - 1, spread = 2 / (9 * freedom);
  return (std::cbrt(statistic / freedom) - (1 - spread)) / std::sqrt(spread);
}

}  // namespace unshard::inference
