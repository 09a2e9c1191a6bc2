#pragma once
// Which KV blocks are in use, by how many sequences, and which unused ones still hold a prefix worth keeping.
#include <cstdint>
#include <vector>

namespace unshard::inference {

/// Every block is in one state. Moves: free -> used -> free, or used -> kept -> used (a prefix found again) or free (evicted).
enum class BlockState : std::uint8_t {
  free,  ///< holds nothing of worth
  used,  ///< at least one sequence has it in its table
  kept,  ///< no sequence uses it, but the prefix index knows it: evicted when no free one is left, least recently used first
};

class BlockPool {
 public:
  explicit BlockPool(std::int64_t blocks);

  struct Taken {
    std::int32_t block = -1;  ///< -1: every block is in use
    bool evicted = false;     ///< it was a kept one: the caller takes it out of its index
  };
  /// A block for one user to write. Cost: O(1).
  Taken take();
  /// One user more of a used or kept block.
  void retain(std::int32_t block);
  /// One user less. Without users it is kept if mark_known() was called since it was taken, else free.
  /// A sequence releases its last block first: then a prefix is always evicted after what continues it.
  void release(std::int32_t block);
  /// The prefix index knows this used block.
  void mark_known(std::int32_t block);

  std::int64_t size() const { return static_cast<std::int64_t>(slots_.size()); }
  std::int64_t available() const { return size() - used_; }  ///< what take() could give out, one after another
  std::int64_t used() const { return used_; }
  std::int32_t users(std::int32_t block) const { return slots_[static_cast<std::size_t>(block)].users; }
  bool known(std::int32_t block) const { return slots_[static_cast<std::size_t>(block)].known; }
  BlockState state(std::int32_t block) const { return slots_[static_cast<std::size_t>(block)].state; }
  /// \throws std::logic_error  lists, counts and states contradict each other. Cost: O(blocks).
  void check() const;

 private:
  struct Slot {
    std::int32_t users = 0, older = -1, newer = -1;  ///< neighbours among the kept blocks
    BlockState state = BlockState::free;
    bool known = false;
  };
  Slot& at(std::int32_t block) { return slots_[static_cast<std::size_t>(block)]; }
  void append_kept(std::int32_t block);
  void unlink_kept(std::int32_t block);

  std::vector<Slot> slots_;
  std::vector<std::int32_t> free_;          ///< a stack: the block freed last is the likeliest to be in the processor's cache
  std::int32_t oldest_ = -1, newest_ = -1;  ///< ends of the list of kept blocks
  std::int64_t used_ = 0;
};

}  // namespace unshard::inference
