#pragma once
// A GPU for tests: runs a kernel's own source on the processor, one thread block after another, each of its threads as a fiber.
//
// A fiber runs until it meets a barrier or a shuffle, and goes on when all it waits for have come. Which of those that can run is next is
// drawn at random: a result that depends on the order of threads between two barriers (a missing barrier) comes out wrong sooner or later.
// Fibers that wait for ever (a barrier that not all threads reach) are an error.
#include <ucontext.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <vector>

#include "inference/weights/half.h"

namespace unshard::inference::emulated {

struct Index {
  unsigned x = 0, y = 0, z = 0;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};

/// Of the fiber that runs.
inline Index threadIdx, blockIdx, gridDim;

class Block {
 public:
  Block(unsigned threads, std::mt19937& random) : fibers_(threads), random_(random) {}

  void run(const std::function<void()>& body) {
    body_ = &body;
    current() = this;
    for (auto& fiber : fibers_) start(fiber);
    for (std::size_t left = fibers_.size(); left > 0;) {
      at_ = pick();
      threadIdx = {static_cast<unsigned>(at_), 0, 0};
      swapcontext(&scheduler_, &fibers_[at_].context);
      left -= fibers_[at_].done ? 1 : 0;
    }
    current() = nullptr;
  }

  void barrier() { meet(0, fibers_.size()); }
  float shuffle_xor(float value, int other) {
    const std::size_t warp = at_ / kWarp, me = at_;
    fibers_[me].offered = value;
    meet(warp * kWarp, (warp + 1) * kWarp);
    const float got = fibers_[warp * kWarp + ((me % kWarp) ^ static_cast<std::size_t>(other))].offered;
    meet(warp * kWarp, (warp + 1) * kWarp);  // before anyone offers the next
    return got;
  }
  static Block*& current() {
    static Block* block = nullptr;
    return block;
  }

 private:
  static constexpr std::size_t kWarp = 32, kStack = 1 << 16;
  struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    bool done = false, waits = false;
    std::size_t begin = 0, end = 0;  ///< of the fibers it waits for
    float offered = 0;
  };

  void start(Fiber& fiber) {
    fiber.stack = std::make_unique<char[]>(kStack);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStack;
    fiber.context.uc_link = &scheduler_;
    makecontext(&fiber.context, &Block::enter, 0);
  }
  static void enter() {
    Block& block = *current();
    (*block.body_)();
    block.fibers_[block.at_].done = true;
  }
  /// Wait until fibers [begin, end) all wait for each other. The last to come lets them all go on.
  void meet(std::size_t begin, std::size_t end) {
    Fiber& me = fibers_[at_];
    me.waits = true, me.begin = begin, me.end = end;
    bool all = true;
    for (std::size_t i = begin; i < end; ++i) all = all && fibers_[i].waits && fibers_[i].begin == begin && fibers_[i].end == end;
    if (all)
      for (std::size_t i = begin; i < end; ++i) fibers_[i].waits = false;
    swapcontext(&me.context, &scheduler_);
  }
  std::size_t pick() {
    std::vector<std::size_t>& ready = ready_;
    ready.clear();
    for (std::size_t i = 0; i < fibers_.size(); ++i)
      if (!fibers_[i].done && !fibers_[i].waits) ready.push_back(i);
    if (ready.empty()) throw std::logic_error("the threads of a block wait for each other for ever");
    return ready[random_() % ready.size()];
  }

  std::vector<Fiber> fibers_;
  std::vector<std::size_t> ready_;
  std::mt19937& random_;
  const std::function<void()>* body_ = nullptr;
  ucontext_t scheduler_;
  std::size_t at_ = 0;
};

/// All blocks of a launch, in any order.
inline void launch(Index grid, unsigned threads, std::mt19937& random, const std::function<void()>& kernel) {
  gridDim = grid;
  std::vector<Index> blocks;
  for (unsigned x = 0; x < grid.x; ++x)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned z = 0; z < grid.z; ++z) blocks.push_back({x, y, z});
  std::shuffle(blocks.begin(), blocks.end(), random);
  for (const Index& block : blocks) {
    blockIdx = block;
    Block(threads, random).run(kernel);
  }
}

// ---- the words of CUDA that a kernel uses ----
inline void __syncthreads() { Block::current()->barrier(); }
inline float __shfl_xor_sync(unsigned, float value, int other) { return Block::current()->shuffle_xor(value, other); }
inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
inline float float_of_half_bits(std::uint16_t bits) { return float_of_f16(bits); }

}  // namespace unshard::inference::emulated

#define __device__
#define __global__
#define __shared__ static
#define __launch_bounds__(threads)
