#pragma once
// How much is occupied at each of a row of places; ranges grow, and room is looked for, in logarithmic time. Pure.
#include <cstddef>
#include <cstdint>
#include <vector>

namespace unshard::zero {

class Occupancy {
 public:
  explicit Occupancy(const std::vector<std::int64_t>& amounts);

  /// `amount` more at the places [from, end).
  void add(std::size_t from, std::size_t end, std::int64_t amount);
  /// The first place p >= bound such that nothing in [p, end) is above `limit`; end: not even the last place is free.
  std::size_t room_before(std::size_t end, std::size_t bound, std::int64_t limit) const;
  std::int64_t most() const;

 private:
  // A node of the tree over [first, first + span).
  struct Node {
    std::size_t index, first, span;
    Node left() const { return {2 * index, first, span / 2}; }
    Node right() const { return {2 * index + 1, first + span / 2, span / 2}; }
  };
  void add(const Node& node, std::size_t from, std::size_t end, std::int64_t amount);
  std::size_t last_above(const Node& node, std::size_t from, std::size_t end, std::int64_t limit) const;

  std::size_t places_, span_;
  std::vector<std::int64_t> most_, pending_;  // by node: the most in its range, `pending_` included, which is meant for all of the range
};

}  // namespace unshard::zero
