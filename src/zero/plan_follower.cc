#include "zero/plan_follower.h"

#include <algorithm>

namespace unshard::zero {

PlanFollower::PlanFollower(HostCopy& host_copy) : host_copy_(host_copy) {}

void PlanFollower::begin(bool agreed) {
  ++turn_;
  agreed_ = agreed;
  position_ = 0;
  own_cursor_.store(HostCopy::pack(turn_, 0));
  host_copy_.progress(host_copy_.local_rank()).store(HostCopy::pack(turn_, 0), std::memory_order_release);
}

void PlanFollower::moved(std::size_t position) {
  const bool starts_over = position < position_;
  position_ = position;
  const auto word = HostCopy::pack(turn_, static_cast<std::uint32_t>(position));
  host_copy_.progress(host_copy_.local_rank()).store(word, std::memory_order_release);
  if (!starts_over) return;
  const auto index = plan_.gather_from(position);
  auto& next = cursor();
  auto seen = next.load();
  while (HostCopy::turn_of(seen) == turn_ && HostCopy::position_of(seen) > index &&
         !next.compare_exchange_weak(seen, HostCopy::pack(turn_, static_cast<std::uint32_t>(index)))) {
  }
}

// A cursor of an older turn stands at this turn's head; one of a newer turn says that others have finished this plan.
std::size_t PlanFollower::index_of(std::uint64_t cursor_word) const {
  const auto ahead = static_cast<std::int32_t>(HostCopy::turn_of(cursor_word) - turn_);
  return ahead < 0 ? 0 : ahead > 0 ? plan_.gathers.size() : HostCopy::position_of(cursor_word);
}

PlanFollower::Positions PlanFollower::positions() {
  Positions all;
  if (!agreed_) {
    all.push_back(position_);
    return all;
  }
  for (int rank = 0; rank < host_copy_.local_ranks(); ++rank) {
    const auto word = host_copy_.progress(rank).load(std::memory_order_acquire);
    const auto ahead = static_cast<std::int32_t>(HostCopy::turn_of(word) - turn_);
    if (ahead <= 0) all.push_back(ahead < 0 ? 0 : HostCopy::position_of(word));
  }
  return all;
}

std::uint64_t PlanFollower::others_progress() {
  std::uint64_t sum = 0;
  for (int rank = 0; rank < host_copy_.local_ranks(); ++rank) {
    if (rank != host_copy_.local_rank())
      sum += host_copy_.progress(rank).load(std::memory_order_acquire) * (2 * static_cast<unsigned>(rank) + 1);
  }
  return sum;
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
    if (!next.compare_exchange_weak(seen, HostCopy::pack(turn_, static_cast<std::uint32_t>(index + 1)))) continue;
    if (plan_.gathers[index].last_use >= *slowest) return index;  // else everybody has passed it
    seen = next.load();
  }
}

void PlanFollower::put_back(std::size_t index) {
  auto taken = HostCopy::pack(turn_, static_cast<std::uint32_t>(index + 1));
  cursor().compare_exchange_strong(taken, HostCopy::pack(turn_, static_cast<std::uint32_t>(index)));
}

}  // namespace unshard::zero
