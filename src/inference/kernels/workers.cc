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

// [Note: a call's life] The caller writes function and context, sets `working` and counts `call` up; each worker sees the new number,
// computes and counts `working` down; the caller waits until it is 0. Nobody touches function or context between calls.
struct Workers::Impl {
  std::vector<std::thread> threads;
  void (*function)(void*, std::int64_t) = nullptr;
  void* context = nullptr;
  alignas(64) std::atomic<std::uint32_t> call{0};
  alignas(64) std::atomic<std::uint32_t> working{0};
  alignas(64) std::atomic<bool> busy{false};
  bool stop = false;
  std::mutex error_mutex;
  std::exception_ptr error;

  void compute(std::int64_t worker) {
    try {
      function(context, worker);
    } catch (...) {  // kept, and thrown from run()
      const std::lock_guard lock(error_mutex);
      if (!error) error = std::current_exception();
    }
  }

  void loop(std::int64_t worker) {
    for (std::uint32_t seen = 0;;) {
      seen = wait_for_change(call, seen);
      if (stop) return;
      compute(worker);
      if (working.fetch_sub(1, std::memory_order_acq_rel) == 1) working.notify_one();
    }
  }

  void announce() {
    call.fetch_add(1, std::memory_order_acq_rel);
    call.notify_all();
  }

  void join() {
    stop = true;
    announce();
    for (std::thread& thread : threads) thread.join();
  }
};

Workers::Workers(std::int64_t threads, bool pin) : impl_(std::make_unique<Impl>()) {
  require(threads >= 0 && threads <= 1024, "[inference.workers] threads is ", threads, "; 0 (all cores) to 1024 are accepted");
  const std::vector<int> cores = allowed_cores();
  const auto count = threads == 0 ? cores.size() : static_cast<std::size_t>(threads);
  // The caller's thread isn't ours to pin: the kernel keeps it off the cores that pinned workers fill. More workers than cores: none is.
  pin = pin && count <= cores.size();
  try {
    for (std::size_t worker = 1; worker < count; ++worker) {
      const int core = pin ? cores[worker] : -1;
      impl_->threads.emplace_back([this, worker, core] {
        if (core >= 0) pin_this_thread(core);
        impl_->loop(static_cast<std::int64_t>(worker));
      });
    }
  } catch (...) {
    impl_->join();
    throw;
  }
}

Workers::~Workers() { impl_->join(); }

std::int64_t Workers::count() const { return static_cast<std::int64_t>(impl_->threads.size()) + 1; }

void Workers::run_raw(void (*f)(void*, std::int64_t), void* context) {
  Impl& impl = *impl_;
  UNSHARD_DCHECK(!impl.busy.exchange(true), "Workers::run is called while another call runs");
  impl.function = f;
  impl.context = context;
  const auto others = static_cast<std::uint32_t>(impl.threads.size());
  if (others > 0) {
    impl.working.store(others, std::memory_order_relaxed);
    impl.announce();
  }
  impl.compute(0);
  for (std::uint32_t left = impl.working.load(std::memory_order_acquire); left != 0;) left = wait_for_change(impl.working, left);
  const std::exception_ptr error = std::exchange(impl.error, nullptr);
  impl.busy.store(false);
  if (error) std::rethrow_exception(error);
}

void Workers::for_raw(std::int64_t n, std::int64_t grain, void (*f)(void*, std::int64_t, std::int64_t), void* context) {
  grain = std::max<std::int64_t>(grain, 1);
  if (n <= grain || count() == 1) {
    for (std::int64_t begin = 0; begin < n; begin += grain) f(context, begin, std::min(begin + grain, n));
    return;
  }
  std::atomic<std::int64_t> next{0};
  run([&](std::int64_t) {
    for (std::int64_t begin = next.fetch_add(grain); begin < n; begin = next.fetch_add(grain))
      f(context, begin, std::min(begin + grain, n));
  });
}

}  // namespace unshard::inference
