#pragma once
// Threads that compute together: pinned to cores, woken within a microsecond while a step runs, asleep between steps.
#include <cstdint>
#include <memory>
#include <type_traits>

namespace unshard::inference {

class Workers {
 public:
  /// \param threads  0: the cores this process may use. The caller of run() is worker 0; threads - 1 more are started.
  explicit Workers(std::int64_t threads = 0, bool pin = true);
  ~Workers();
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;
  std::int64_t count() const;

  /// f(worker) on every worker; returns when all have. One caller at a time. An exception of any f comes out of this call.
  template <class F>
  void run(F&& f) {
    run_raw([](void* context, std::int64_t worker) { (*static_cast<std::remove_reference_t<F>*>(context))(worker); },
            const_cast<void*>(static_cast<const void*>(&f)));
  }
  /// f(begin, end) over [0, n) in pieces of `grain`, handed out as workers become free.
  template <class F>
  void parallel_for(std::int64_t n, std::int64_t grain, F&& f) {
    for_raw(
        n, grain,
        [](void* context, std::int64_t begin, std::int64_t end) { (*static_cast<std::remove_reference_t<F>*>(context))(begin, end); },
        const_cast<void*>(static_cast<const void*>(&f)));
  }

 private:
  void run_raw(void (*f)(void*, std::int64_t), void* context);
  void for_raw(std::int64_t n, std::int64_t grain, void (*f)(void*, std::int64_t, std::int64_t), void* context);
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace unshard::inference
