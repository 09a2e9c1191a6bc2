#pragma once
// What a step takes by the number of its rows, and so which guesses pay.
//
// [Note: when a guess pays] While a step's time goes into reading weights, rows more cost little; where arithmetic bounds it, a row costs
// its full share, and a guess that may be wrong loses. Both are seen in a model's times for 1, 2, 4, ... rows, measured once when the
// engine starts. A step then computes the guesses that make the expected tokens a second most: the likeliest first (a guess counts only if
// those before it are right, so its chance is their product), as many as raise (sequences + sum of chances) / seconds.
#include <cstdint>
#include <span>
#include <vector>

namespace unshard::inference {

class Runner;

class StepCost {
 public:
  struct Point {
    std::int64_t rows;
    double seconds;
  };
  /// \param points  by rows, at least one
  explicit StepCost(std::vector<Point> points);
  /// Measured on a runner that computes nothing else and whose cache holds nothing: 5 rounds, or fewer where they take long.
  /// Of most_rows rows at most, and of kMostMeasured. Cost: up to 5 steps of each size, 1, 2, 4, ... rows, or one where they take long.
  static constexpr std::int64_t kMostMeasured = 512;  ///< rows have logits each: of 2,048 a large vocabulary's take a gigabyte
  static StepCost measure(Runner& runner, std::int64_t most_rows);
  /// Straight lines between the points; beyond the last as between the last two.
  double seconds(std::int64_t rows) const { return load_ * along_lines(rows); }
  /// Times of all steps over those that were measured. What a draft takes is measured once, and then taken to be longer as this is.
  double load() const { return load_; }
  /// Of so many rows in steps of the largest size that was measured.
  double seconds_of_many(std::int64_t rows) const {
    return seconds(points_.back().rows) * static_cast<double>(rows) / static_cast<double>(points_.back().rows);
  }
  /// A step of so many rows, each of a sequence that got its next token, took so long.
  void observe(std::int64_t rows, double seconds);

 private:
  double along_lines(std::int64_t rows) const;
  std::vector<Point> points_;
  double load_ = 1;  ///< longer contexts, other work on the machine
};

/// What is known of a sequence before its guesses are chosen.
struct Outlook {
  std::vector<double> chances;  ///< of each of its guesses: that it and those before it are right; never rising
  std::int64_t first_rows = 1;  ///< that the draft computes for its first guess: what came since the last one
};

struct GuessPlan {
  std::vector<std::int64_t> guesses;  ///< of each sequence, to compute
  double gain = 1;                    ///< expected tokens a second, over those without guesses
};

/// The guesses of a step that has `rows` without them.
/// \param room   guesses that fit in the step
/// \param draft  what the draft's steps take; null: guesses are there already
GuessPlan guesses_that_pay(std::span<const Outlook> sequences, std::int64_t rows, std::int64_t room, const StepCost& target,
                           const StepCost* draft);

}  // namespace unshard::inference
