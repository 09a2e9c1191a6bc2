#include "zero/plan_follower.h"

#include <algorithm>

namespace unshard::zero {
namespace {

// A word: step (24 bits), pass (20 bits), place (20 bits); the first two are the turn.
constexpr int kPlaceBits = 20, kPassBits = 20;
constexpr std::uint64_t kLastPass = (std::uint64_t{1} << kPassBits) - 1;
std::uint64_t pack(std::uint64_t turn, std::size_t place) { return (turn << kPlaceBits) | place; }
std::size_t place_in(std::uint64_t word) { return word & ((std::uint64_t{1} << kPlaceBits) - 1); }
/// How many turns the word is ahead of `turn`.
std::int64_t ahead(std::uint64_t word, std::uint64_t turn) {
  return static_cast<std::int64_t>(((word >> kPlaceBits) - turn) << kPlaceBits) >> kPlaceBits;
}

}  // namespace

PlanFollower::PlanFollower(HostCopy& host_copy, std::size_t plan) : host_copy_(host_copy), plan_index_(plan) {}

std::atomic<std::uint64_t>& PlanFollower::own_progress() { return host_copy_.progress(plan_index_, host_copy_.local_rank()); }

void PlanFollower::begin(std::uint64_t turn) {
  turn_ = turn;
  position_ = 0;
  own_cursor_.store(pack(turn_, 0));
  own_progress().store(pack(turn_, 0), std::memory_order_release);
}

void PlanFollower::begin_step() { begin(((turn_ >> kPassBits) + 1) << kPassBits); }
void PlanFollower::begin_pass() { begin((turn_ & kLastPass) == kLastPass ? turn_ : turn_ + 1); }
void PlanFollower::leave() { own_progress().store(pack(turn_ | kLastPass, 0), std::memory_order_release); }
void PlanFollower::resume() { start_over_from(plan_.gather_from(position_)); }

void PlanFollower::start_over_from(std::size_t index) {
  auto& next = cursor();
  auto seen = next.load();
  while (ahead(seen, turn_) == 0 && place_in(seen) > index && !next.compare_exchange_weak(seen, pack(turn_, index))) {
  }
}

void PlanFollower::moved(std::size_t position) {
  const bool starts_over = position < position_;
  position_ = position;
  own_progress().store(pack(turn_, position), std::memory_order_release);
  if (starts_over) start_over_from(plan_.gather_from(position));
}

// A cursor of an older turn stands at this turn's head; one of a newer turn says that others have finished this plan.
std::size_t PlanFollower::index_of(std::uint64_t cursor_word) const {
  const auto turns = ahead(cursor_word, turn_);
  return turns < 0 ? 0 : turns > 0 ? plan_.gathers.size() : place_in(cursor_word);
}

PlanFollower::Positions PlanFollower::positions() {
  Positions all;
  if (!agreed_) {
    all.push_back(position_);
    return all;
  }
  for (int rank = 0; rank < host_copy_.local_ranks(); ++rank) {
    const auto word = host_copy_.progress(plan_index_, rank).load(std::memory_order_acquire);
    const auto turns = ahead(word, turn_);
    if (rank == host_copy_.local_rank() || turns <= 0)
      all.push_back(rank == host_copy_.local_rank() ? position_ : turns < 0 ? 0 : place_in(word));
  }
  return all;
}

bool PlanFollower::has_work() {
  const auto index = index_of(cursor().load());
  if (index >= plan_.gathers.size()) return false;
  const auto all = positions();
  return plan_.gathers[index].issue <= *std::max_element(all.begin(), all.end());
}

std::optional<std::size_t> PlanFollower::take() {
  const auto all = positions();
  const auto [slowest, fastest] = std::minmax_element(all.begin(), all.end());
  auto& next = cursor();
  auto seen = next.load();
  for (;;) {
    const auto index = index_of(seen);
    if (index >= plan_.gathers.size() || plan_.gathers[index].issue > *fastest) return std::nullopt;
    if (!next.compare_exchange_weak(seen, pack(turn_, index + 1))) continue;
    if (plan_.gathers[index].last_use >= *slowest) return index;  // else everybody has passed it
    seen = next.load();
  }
}

void PlanFollower::put_back(std::size_t index) {
  auto taken = pack(turn_, index + 1);
  cursor().compare_exchange_strong(taken, pack(turn_, index));
}

}  // namespace unshard::zero
