#pragma once
// Outputs on their way from the engine's thread to whoever asks.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <utility>
#include <vector>

#include "unshard/inference/engine.h"

namespace unshard::inference {

class Outbox {
 public:
  static constexpr double kLongest_s = 86400;  // beyond some centuries a clock's arithmetic would wrap round
  void put(std::vector<Output>&& more) {
    if (more.empty()) return;
    {
      std::lock_guard lock(mutex_);
      for (auto& output : more) waiting_.push_back(std::move(output));
    }
    more.clear();
    changed_.notify_all();
  }
  /// From now on take() throws it, once what came before is taken.
  void fail(std::exception_ptr cause) {
    {
      std::lock_guard lock(mutex_);
      cause_ = std::move(cause);
    }
    changed_.notify_all();
  }
  /// From now on take() waits for nothing.
  void end() {
    {
      std::lock_guard lock(mutex_);
      ended_ = true;
    }
    changed_.notify_all();
  }
  std::vector<Output> take(double timeout_s) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, std::chrono::duration<double>(std::clamp(timeout_s, 0.0, kLongest_s)),
                      [&] { return !waiting_.empty() || cause_ || ended_; });
    if (waiting_.empty() && cause_) std::rethrow_exception(cause_);
    return std::exchange(waiting_, {});
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Output> waiting_;
  std::exception_ptr cause_;
  bool ended_ = false;
};

}  // namespace unshard::inference
