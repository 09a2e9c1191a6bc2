#pragma once
// Calls of foreign code that may never return: a store whose server stopped, a connection to a process that died.
#include <chrono>
#include <exception>
#include <functional>
#include <future>
#include <thread>
#include <type_traits>

namespace unshard::comm {

/// What `function` returns or throws, on a thread of its own; `check(seconds waited)` is called about every 50 ms on this one, and leaves
/// by throwing: the thread is then left to itself, so `function` must own what it uses.
template <class Function>
auto aside(Function function, const std::function<void(double waited_s)>& check) -> std::invoke_result_t<Function> {
  using Clock = std::chrono::steady_clock;
  const auto started = Clock::now();
  std::packaged_task<std::invoke_result_t<Function>()> task(std::move(function));
  auto result = task.get_future();
  std::thread thread(std::move(task));
  try {
    while (result.wait_for(std::chrono::milliseconds(50)) != std::future_status::ready)
      if (check) check(std::chrono::duration<double>(Clock::now() - started).count());
  } catch (...) {
    thread.detach();
    throw;
  }
  thread.join();
  return result.get();
}

}  // namespace unshard::comm
