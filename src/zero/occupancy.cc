#include "zero/occupancy.h"

#include <algorithm>
#include <bit>

namespace unshard::zero {
namespace {
constexpr std::size_t kNone = SIZE_MAX;
}

Occupancy::Occupancy(const std::vector<std::int64_t>& amounts)
    : places_(amounts.size()), span_(std::bit_ceil(std::max<std::size_t>(amounts.size(), 1))), most_(2 * span_), pending_(2 * span_) {
  std::copy(amounts.begin(), amounts.end(), most_.begin() + static_cast<std::ptrdiff_t>(span_));
  for (std::size_t node = span_; node-- > 1;) most_[node] = std::max(most_[2 * node], most_[2 * node + 1]);
}

void Occupancy::add(std::size_t from, std::size_t end, std::int64_t amount) {
  if (from < end) add({1, 0, span_}, from, end, amount);
}

void Occupancy::add(const Node& node, std::size_t from, std::size_t end, std::int64_t amount) {
  if (end <= node.first || node.first + node.span <= from) return;
  if (from <= node.first && node.first + node.span <= end) {
    most_[node.index] += amount;
    pending_[node.index] += amount;
    return;
  }
  add(node.left(), from, end, amount);
  add(node.right(), from, end, amount);
  most_[node.index] = std::max(most_[node.left().index], most_[node.right().index]) + pending_[node.index];
}

std::size_t Occupancy::room_before(std::size_t end, std::size_t bound, std::int64_t limit) const {
  const auto last = bound < end ? last_above({1, 0, span_}, bound, end, limit) : kNone;
  return last == kNone ? std::min(bound, end) : last + 1;
}

std::size_t Occupancy::last_above(const Node& node, std::size_t from, std::size_t end, std::int64_t limit) const {
  if (end <= node.first || node.first + node.span <= from || most_[node.index] <= limit) return kNone;
  if (node.span == 1) return node.first;
  limit -= pending_[node.index];
  const auto right = last_above(node.right(), from, end, limit);
  return right != kNone ? right : last_above(node.left(), from, end, limit);
}

std::int64_t Occupancy::most() const { return places_ == 0 ? 0 : most_[1]; }

}  // namespace unshard::zero
