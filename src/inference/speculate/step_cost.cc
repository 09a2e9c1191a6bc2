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
  most_rows = std::min({most_rows, kMostMeasured, runner.kv_blocks() * kBlockTokens, runner.info().context});
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

namespace {

/// Time of the draft's steps, as guesses are added: at each place one step, of a row for each sequence that has a guess there.
class Drafting {
 public:
  explicit Drafting(const StepCost* cost) : cost_(cost) {}
  void add(std::size_t place, std::int64_t rows) {
    if (cost_ == nullptr) return;
    rows_.resize(std::max(rows_.size(), place + 1));
    auto& together = rows_[place];
    seconds_ += cost_->seconds(together + rows) - (together > 0 ? cost_->seconds(together) : 0);
    together += rows;
  }
  double seconds() const { return seconds_; }

 private:
  const StepCost* cost_;
  std::vector<std::int64_t> rows_;
  double seconds_ = 0;
};

}  // namespace

GuessPlan guesses_that_pay(std::span<const Outlook> sequences, std::int64_t rows, std::int64_t room, const StepCost& target,
                           const StepCost* draft) {
  struct Guess {
    double chance;
    std::size_t sequence, place;
  };
  std::vector<Guess> guesses;
  for (std::size_t i = 0; i < sequences.size(); ++i)
    for (std::size_t place = 0; place < sequences[i].chances.size(); ++place) guesses.push_back({sequences[i].chances[place], i, place});
  std::ranges::stable_sort(guesses, [](const Guess& a, const Guess& b) { return a.chance > b.chance; });

  double tokens = static_cast<double>(sequences.size());
  const double without = tokens / target.seconds(rows);
  double best = kLeastGain * without;
  Drafting drafting(draft);
  std::size_t taken = 0;
  for (std::size_t i = 0; i < guesses.size() && static_cast<std::int64_t>(i) < room; ++i) {
    const auto& guess = guesses[i];
    tokens += guess.chance;
    drafting.add(guess.place, guess.place == 0 ? sequences[guess.sequence].first_rows : 1);
    const double speed = tokens / (target.seconds(rows + static_cast<std::int64_t>(i) + 1) + target.load() * drafting.seconds());
    if (speed > best) best = speed, taken = i + 1;
  }
  GuessPlan plan{std::vector<std::int64_t>(sequences.size()), taken > 0 ? best / without : 1};
  for (std::size_t i = 0; i < taken; ++i) ++plan.guesses[guesses[i].sequence];
  return plan;
}

}  // namespace unshard::inference
