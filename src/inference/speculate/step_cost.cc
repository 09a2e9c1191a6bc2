#include "inference/speculate/step_cost.h"

#include <algorithm>
#include <chrono>
#include <numeric>

#include "inference/runner.h"
#include "unshard/core/error.h"

namespace unshard::inference {
namespace {

constexpr int kRounds = 5;
constexpr double kLong_s = 0.5;                            // rounds end when they have taken so long
constexpr double kLeastGain = 1.05;                        // what measuring errors could hide isn't worth a try
constexpr double kOfLoad = 1.0 / 16, kOfPoint = 1.0 / 64;  // weight of the latest step

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

/// Tokens of one sequence from its beginning, as a step with guesses has them: logits are wanted of all.
double time_rows(Runner& runner, std::int64_t rows, std::vector<float>& logits) {
  std::vector<std::int32_t> blocks(static_cast<std::size_t>((rows + kBlockTokens - 1) / kBlockTokens));
  std::iota(blocks.begin(), blocks.end(), 0);
  Batch batch;
  batch.add(std::vector<Token>(static_cast<std::size_t>(rows), 0), 0, blocks.data());
  batch.logit_rows.resize(static_cast<std::size_t>(rows));
  std::iota(batch.logit_rows.begin(), batch.logit_rows.end(), 0);
  const double start = now();
  runner.step({}, batch, logits);
  return now() - start;
}

}  // namespace

StepCost::StepCost(std::vector<Point> points) : points_(std::move(points)) {
  require(!points_.empty(), "[inference.speculate] no measured step");
  for (std::size_t i = 1; i < points_.size(); ++i) points_[i].seconds = std::max(points_[i].seconds, points_[i - 1].seconds);
}

StepCost StepCost::measure(Runner& runner, std::int64_t most_rows) {
  most_rows = std::min({most_rows, runner.kv_blocks() * kBlockTokens, runner.info().context});
  std::vector<Point> points;
  for (std::int64_t rows = 1; rows <= most_rows; rows *= 2) points.push_back({rows, 1e9});
  std::vector<float> logits;
  time_rows(runner, 1, logits);  // pages are touched for the first time
  const double start = now();
  for (int round = 0; round < kRounds && (round == 0 || now() - start < kLong_s); ++round)
    for (auto& point : points) point.seconds = std::min(point.seconds, time_rows(runner, point.rows, logits));
  return StepCost(std::move(points));
}

double StepCost::along_lines(std::int64_t rows) const {
  if (points_.size() == 1) return points_.front().seconds;
  auto upper = std::ranges::find_if(points_, [&](const Point& point) { return point.rows >= rows; });
  if (upper == points_.end()) --upper;
  if (upper == points_.begin()) return upper->seconds;
  const Point &low = *(upper - 1), &high = *upper;
  return low.seconds + (high.seconds - low.seconds) * static_cast<double>(rows - low.rows) / static_cast<double>(high.rows - low.rows);
}

void StepCost::observe(std::int64_t rows, double seconds) {
  const double longer = std::clamp(seconds / this->seconds(rows), 0.5, 2.0) - 1;
  load_ *= 1 + kOfLoad * longer;
  for (std::size_t i = 0; i < points_.size(); ++i) {
    const bool below = i + 1 < points_.size() && points_[i + 1].rows <= rows, above = i > 0 && points_[i - 1].rows >= rows;
    if (!below && !above) points_[i].seconds *= 1 + kOfPoint * longer;
  }
  for (std::size_t i = 1; i < points_.size(); ++i) points_[i].seconds = std::max(points_[i].seconds, points_[i - 1].seconds);
}

std::vector<std::int64_t> guesses_that_pay(std::span<const std::vector<double>> chances, std::int64_t rows, std::int64_t room,
                                           const StepCost& target, const StepCost* draft) {
  struct Guess {
    double chance;
    std::size_t sequence, place;
  };
  std::vector<Guess> guesses;
  for (std::size_t i = 0; i < chances.size(); ++i)
    for (std::size_t place = 0; place < chances[i].size(); ++place) guesses.push_back({chances[i][place], i, place});
  std::ranges::stable_sort(guesses, [](const Guess& a, const Guess& b) { return a.chance > b.chance; });

  double tokens = static_cast<double>(chances.size()), drafting = 0;
  double best = kLeastGain * tokens / target.seconds(rows);
  std::vector<std::int64_t> drafted;  // sequences that have a guess at each place
  std::size_t taken = 0;
  for (std::size_t i = 0; i < guesses.size() && static_cast<std::int64_t>(i) < room; ++i) {
    tokens += guesses[i].chance;
    if (draft != nullptr) {
      drafted.resize(std::max(drafted.size(), guesses[i].place + 1));
      auto& together = drafted[guesses[i].place];
      drafting += draft->seconds(together + 1) - (together > 0 ? draft->seconds(together) : 0);
      ++together;
    }
    const double speed = tokens / (target.seconds(rows + static_cast<std::int64_t>(i) + 1) + drafting);
    if (speed > best) best = speed, taken = i + 1;
  }
  std::vector<std::int64_t> result(chances.size());
  for (std::size_t i = 0; i < taken; ++i) ++result[guesses[i].sequence];
  return result;
}

}  // namespace unshard::inference
