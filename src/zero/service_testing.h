#pragma once
// For tests that stand between a store and its shard service.
#include <condition_variable>
#include <memory>
#include <mutex>
#include <utility>

#include "zero/state.h"

namespace unshard::testing {

/// A store's shard service whose fetches a test holds until let_go().
class WrappedService : public ShardService {
 public:
  explicit WrappedService(std::unique_ptr<ShardService> inner) : inner_(std::move(inner)) {}
  /// Between the store and the service that it has. The store owns it.
  template <class Wrapper>
  static Wrapper& put_into(ParameterStore& store) {
    auto& service = zero::state_of(store).service;
    auto wrapper = std::make_unique<Wrapper>(std::move(service));
    auto& reference = *wrapper;
    service = std::move(wrapper);
    return reference;
  }
  void let_go() {
    const std::lock_guard lock(mutex_);
    held_ = false;
    changed_.notify_all();
  }
  std::int64_t bytes_received() const override { return inner_->bytes_received(); }
  std::int64_t bytes_sent() const override { return inner_->bytes_sent(); }

 protected:
  /// Until let_go(). Under the lock.
  void hold(std::unique_lock<std::mutex>& lock) {
    changed_.notify_all();
    changed_.wait(lock, [this] { return !held_; });
  }

  const std::unique_ptr<ShardService> inner_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool held_ = false;
};

}  // namespace unshard::testing
