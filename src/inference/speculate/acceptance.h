#pragma once
// How often guesses are right, by how they were found.
#include <array>
#include <cstdint>

namespace unshard::inference {

/// Moving averages, one for each kind of guess: of a draft model; after a match of 1, 2, 3, 4, 5 to 8, more tokens (each right guess makes
/// the match of the next one longer).
class Acceptance {
 public:
  /// Of the guess that follows a match of so many tokens; 0: of a draft model.
  double of(std::int64_t match) const { return averages_[kind(match)]; }
  /// A guess was right or not. `weight`: of this one in the average.
  void learn(std::int64_t match, bool right, double weight) {
    auto& average = averages_[kind(match)];
    average += weight * ((right ? 1.0 : 0.0) - average);
  }
  /// A draft model that isn't asked can't be seen to have become better: what is thought of it slowly does.
  void hope() { averages_[0] += (kHope - averages_[0]) / 64; }

 private:
  static constexpr double kHope = 0.85;
  static std::size_t kind(std::int64_t match) { return match <= 4 ? static_cast<std::size_t>(match) : match <= 8 ? 5 : 6; }
  std::array<double, 7> averages_{kHope, 0.15, 0.3, 0.45, 0.6, 0.75, 0.9};  ///< until something is known
};

}  // namespace unshard::inference
