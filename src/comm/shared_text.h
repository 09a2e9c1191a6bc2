#pragma once
// A short text in shared memory, written by one rank and read by any, without locks.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace unshard::comm {

/// A seqlock over relaxed words: a writer never waits, a reader tries a few times and then takes what it sees (texts are for messages).
/// All-zero memory is a valid empty text.
template <std::size_t kBytes>
class SharedText {
  static_assert(kBytes % 8 == 0);

 public:
  void set(std::string_view text) {
    const std::size_t length = std::min(text.size(), kBytes);
    // Odd while written. `| 1` heals the parity when two threads of a rank write at the same time (the text may then be a mixture).
    const std::uint32_t version = version_.load(std::memory_order_relaxed) | 1;
    version_.store(version, std::memory_order_relaxed);
    length_.store(static_cast<std::uint32_t>(length), std::memory_order_release);
    for (std::size_t at = 0; at < length; at += 8) {
      std::uint64_t word = 0;
      std::memcpy(&word, text.data() + at, std::min<std::size_t>(8, length - at));
      words_[at / 8].store(word, std::memory_order_relaxed);
    }
    version_.store(version + 1, std::memory_order_release);
  }

  std::string get() const {
    std::array<char, kBytes> copy;
    std::size_t length = 0;
    for (int attempt = 0; attempt < 16; ++attempt) {
      const std::uint32_t before = version_.load(std::memory_order_acquire);
      length = std::min<std::size_t>(length_.load(std::memory_order_acquire), kBytes);
      for (std::size_t at = 0; at < length; at += 8) {
        const std::uint64_t word = words_[at / 8].load(std::memory_order_acquire);
        std::memcpy(copy.data() + at, &word, 8);
      }
      if (before % 2 == 0 && version_.load(std::memory_order_relaxed) == before) break;
    }
    return std::string(copy.data(), length);
  }

 private:
  std::atomic<std::uint32_t> version_;  ///< odd while written
  std::atomic<std::uint32_t> length_;
  std::array<std::atomic<std::uint64_t>, kBytes / 8> words_;
};

}  // namespace unshard::comm
