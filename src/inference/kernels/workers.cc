#include "inference/kernels/workers.h"

#if defined(__linux__)
#include <sched.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "unshard/core/error.h"

namespace unshard::inference {
namespace {

/// How long an idle worker looks for the next call before it sleeps. Longer than the serial pieces of a step, shorter than a time slice,
/// so that idle cores go back to the rest of the process.
constexpr auto kSpin = std::chrono::microseconds(200);

void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

/// Wait until `value` isn't `old`: first looking, then asleep.
std::uint32_t wait_for_change(const std::atomic<std::uint32_t>& value, std::uint32_t old) {
  const auto end = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 64; ++i) {
      const std::uint32_t now = value.load(std::memory_order_acquire);
      if (now != old) return now;
      pause_briefly();
    }
  } while (std::chrono::steady_clock::now() < end);
  value.wait(old, std::memory_order_acquire);
  return value.load(std::memory_order_acquire);
}

/// The cores this process may use.
std::vector<int> allowed_cores() {
  std::vector<int> cores;
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0) {
    for (int core = 0; core < CPU_SETSIZE; ++core) {
      if (CPU_ISSET(core, &set)) cores.push_back(core);
    }
  }
#endif
  if (cores.empty()) {
    for (int core = 0; core < std::max(1, static_cast<int>(std::thread::hardware_concurrency())); ++core) cores.push_back(core);
  }
  return cores;
}

/// A core that is gone or forbidden by now leaves the thread unpinned, which costs speed only.
void pin_this_thread(int core) {
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  static_cast<void>(sched_setaffinity(0, sizeof set, &set));
#else
  static_cast<void>(core);
#endif
}

}  // namespace

// [Note: a call's life] The caller writes what the call is, then counts `call` up, by an even or odd number as its kind is.
// run(): every worker computes and counts `working` down; the caller waits for 0, so nothing it wrote changes before.
// parallel_for(): pieces are claimed from the workers' regions, their own first, which keeps neighbouring pieces on one core, then the
// others'. The caller waits until all pieces are done, not for the workers: one that the system keeps from running is late, and finds
// nothing left. It may find the pieces of a later call, and does them. So nothing of the call may be read before a piece is claimed; from
// then on until the piece is done the call can't end.
struct Workers::Impl {
  /// The pieces of one worker: those left begin at the upper half of the number and end before the lower half.
  struct alignas(64) Region {
    std::atomic<std::uint64_t> left{0};
    /// \return a piece, or -1
    std::int64_t claim() {
      if (is_empty(left.load(std::memory_order_relaxed))) return -1;  // doesn't take the cache line from others
      const std::uint64_t before = left.fetch_add(std::uint64_t{1} << 32, std::memory_order_acq_rel);
      return is_empty(before) ? -1 : static_cast<std::int64_t>(before >> 32);
    }
    void set(std::int64_t begin, std::int64_t end) {
      left.store(static_cast<std::uint64_t>(begin) << 32 | static_cast<std::uint64_t>(end), std::memory_order_release);
    }
    static bool is_empty(std::uint64_t left) { return (left >> 32) >= (left & 0xffffffff); }
  };

  std::vector<std::thread> threads;
  std::vector<Region> regions;
  void* context = nullptr;
  void (*each_worker)(void*, std::int64_t) = nullptr;
  void (*range)(void*, std::int64_t, std::int64_t) = nullptr;
  std::int64_t n = 0, grain = 1;
  alignas(64) std::atomic<std::uint32_t> call{0};     ///< odd: run()
  alignas(64) std::atomic<std::uint32_t> working{0};  ///< workers of run(), or pieces of parallel_for(), that aren't done
  alignas(64) std::atomic<bool> busy{false};
  std::atomic<bool> stop{false};
  std::mutex error_mutex;
  std::exception_ptr error;

  explicit Impl(std::size_t count) : regions(count) {}

  template <class F>
  void compute(F f) {
    try {
      f();
    } catch (...) {  // kept, and thrown where the call returns
      const std::lock_guard lock(error_mutex);
      if (!error) error = std::current_exception();
    }
    if (working.fetch_sub(1, std::memory_order_acq_rel) == 1) working.notify_one();
  }

  void compute_pieces(std::size_t worker) {
    for (std::size_t i = 0; i < regions.size(); ++i) {
      Region& region = regions[(worker + i) % regions.size()];
      for (std::int64_t piece = region.claim(); piece >= 0; piece = region.claim()) {
        compute([&] { range(context, piece * grain, std::min((piece + 1) * grain, n)); });
      }
    }
  }

  void loop(std::size_t worker) {
    for (std::uint32_t seen = 0;;) {
      seen = wait_for_change(call, seen);
      if (stop) return;
      if (seen % 2 == 0) {
        compute_pieces(worker);
      } else {
        compute([&] { each_worker(context, static_cast<std::int64_t>(worker)); });
      }
    }
  }

  void announce(bool odd) {
    const std::uint32_t now = call.load(std::memory_order_relaxed);
    call.store(now + 1 + ((now + 1) % 2 == (odd ? 1 : 0) ? 0 : 1), std::memory_order_release);
    call.notify_all();
  }

  void start() { UNSHARD_DCHECK(!busy.exchange(true), "a call of Workers inside another one"); }

  void finish() {
    for (std::uint32_t left = working.load(std::memory_order_acquire); left != 0;) left = wait_for_change(working, left);
    const std::exception_ptr thrown = std::exchange(error, nullptr);
    busy.store(false);
    if (thrown) std::rethrow_exception(thrown);
  }

  void join() {
    stop = true;
    announce(true);
    for (std::thread& thread : threads) thread.join();
  }
};

Workers::Workers(std::int64_t threads, bool pin) {
  require(threads >= 0 && threads <= 1024, "[inference.workers] threads is ", threads, "; 0 (all cores) to 1024 are accepted");
  const std::vector<int> cores = allowed_cores();
  const auto count = threads == 0 ? cores.size() : static_cast<std::size_t>(threads);
  impl_ = std::make_unique<Impl>(count);
  // The caller's thread isn't ours to pin: the kernel keeps it off the cores that pinned workers fill. More workers than cores: none is.
  pin = pin && count <= cores.size();
  try {
    for (std::size_t worker = 1; worker < count; ++worker) {
      const int core = pin ? cores[worker] : -1;
      impl_->threads.emplace_back([impl = impl_.get(), worker, core] {
        if (core >= 0) pin_this_thread(core);
        impl->loop(worker);
      });
    }
  } catch (...) {
    impl_->join();
    throw;
  }
}

Workers::~Workers() { impl_->join(); }

std::int64_t Workers::count() const { return static_cast<std::int64_t>(impl_->regions.size()); }

void Workers::run_raw(void (*f)(void*, std::int64_t), void* context) {
  Impl& impl = *impl_;
  impl.start();
  impl.each_worker = f;
  impl.context = context;
  impl.working.store(static_cast<std::uint32_t>(count()), std::memory_order_relaxed);
  if (count() > 1) impl.announce(true);
  impl.compute([&] { f(context, 0); });
  impl.finish();
}

void Workers::for_raw(std::int64_t n, std::int64_t grain, void (*f)(void*, std::int64_t, std::int64_t), void* context) {
  grain = std::max<std::int64_t>(grain, 1);
  if (n <= grain || count() == 1) {
    for (std::int64_t begin = 0; begin < n; begin += grain) f(context, begin, std::min(begin + grain, n));
    return;
  }
  Impl& impl = *impl_;
  impl.start();
  const std::int64_t pieces = (n + grain - 1) / grain;
  UNSHARD_DCHECK(pieces < std::int64_t{1} << 31, "parallel_for of ", n, " in pieces of ", grain);
  impl.range = f;
  impl.context = context;
  impl.n = n;
  impl.grain = grain;
  impl.working.store(static_cast<std::uint32_t>(pieces), std::memory_order_relaxed);
  for (std::int64_t w = 0; w < count(); ++w)
    impl.regions[static_cast<std::size_t>(w)].set(pieces * w / count(), pieces * (w + 1) / count());
  impl.announce(false);
  impl.compute_pieces(0);
  impl.finish();
}

}  // namespace unshard::inference
