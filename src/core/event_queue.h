#pragma once
// A bounded queue that any thread adds to without a lock and one thread empties (D. Vyukov's scheme: each slot says whose turn it is).
// Full: an event is counted and lost, nobody waits.
#include <atomic>
#include <bit>
#include <cstdint>
#include <memory>

#include "unshard/core/error.h"

namespace unshard {

template <class Event>
class EventQueue {
 public:
  /// \param capacity  a power of two
  explicit EventQueue(std::size_t capacity) : mask_(capacity - 1), slots_(std::make_unique<Slot[]>(capacity)) {
    require(capacity >= 2 && std::has_single_bit(capacity), "[core.EventQueue] capacity ", capacity, "; wanted a power of two");
    for (std::size_t i = 0; i < capacity; ++i) slots_[i].turn.store(i, std::memory_order_relaxed);
  }

  /// `fill(Event&)` writes the event in place.
  template <class Fill>
  void push(Fill&& fill) {
    std::uint64_t position = tail_.load(std::memory_order_relaxed);
    for (;;) {
      Slot& slot = slots_[position & mask_];
      const auto ahead = static_cast<std::int64_t>(slot.turn.load(std::memory_order_acquire) - position);
      if (ahead == 0) {
        if (!tail_.compare_exchange_weak(position, position + 1, std::memory_order_relaxed)) continue;
        fill(slot.event);
        slot.turn.store(position + 1, std::memory_order_release);
        return;
      }
      if (ahead < 0) {
        dropped_.fetch_add(1, std::memory_order_relaxed);
        return;
      }
      position = tail_.load(std::memory_order_relaxed);
    }
  }

  /// One thread. `take(const Event&)` for what is there, oldest first; stops at one that is still being written.
  template <class Take>
  void drain(Take&& take) {
    for (;; ++head_) {
      Slot& slot = slots_[head_ & mask_];
      if (slot.turn.load(std::memory_order_acquire) != head_ + 1) return;
      take(slot.event);
      slot.turn.store(head_ + mask_ + 1, std::memory_order_release);
    }
  }

  std::size_t capacity() const { return mask_ + 1; }
  /// About; the thread that empties.
  std::size_t size() const { return tail_.load(std::memory_order_relaxed) - head_; }
  std::int64_t dropped() const { return dropped_.load(std::memory_order_relaxed); }

 private:
  struct Slot {
    std::atomic<std::uint64_t> turn{0};
    Event event;
  };
  const std::size_t mask_;
  const std::unique_ptr<Slot[]> slots_;
  alignas(64) std::atomic<std::uint64_t> tail_{0};
  std::atomic<std::int64_t> dropped_{0};
  alignas(64) std::uint64_t head_ = 0;
};

}  // namespace unshard
