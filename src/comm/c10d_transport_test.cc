// An operation that is under way when a peer is known to have ended: it completes when it needs nothing more, else the peer is named.
#include "comm/c10d_transport.h"

#include <ATen/core/ivalue.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "unshard/core/error.h"

namespace unshard::comm {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

/// Completes after a while, or never.
class LateWork final : public c10d::Work {
 public:
  explicit LateWork(std::chrono::milliseconds after) : future_(c10::make_intrusive<at::ivalue::Future>(c10::NoneType::get())) {
    if (after > 0ms)
      std::thread([future = future_, after] {
        std::this_thread::sleep_for(after);
        future->markCompleted(at::IValue());
      }).detach();
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  bool wait(std::chrono::milliseconds) override {
    future_->wait();
    return true;
  }

 private:
  const c10::intrusive_ptr<at::ivalue::Future> future_;
};

class LateBackend final : public c10d::Backend {
 public:
  explicit LateBackend(std::chrono::milliseconds after) : Backend(0, 2), after_(after) {}
  const std::string getBackendName() const override { return "late"; }
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor&, at::Tensor&, const c10d::AllgatherOptions&) override {
    return c10::make_intrusive<LateWork>(after_);
  }

 private:
  const std::chrono::milliseconds after_;
};

/// The error of an all_gather that completes after `after` (0: never), while `ended` is known of rank 1; and how long it took.
std::pair<std::string, Clock::duration> gather(std::chrono::milliseconds after, const std::string& ended) {
  auto group = c10::make_intrusive<c10d::ProcessGroup>(c10::make_intrusive<c10d::HashStore>(), 0, 2);
  group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::CUSTOM, c10::make_intrusive<LateBackend>(after));
  C10dOptions options;
  options.timeout = 20s;
  options.ended = [&](bool) { return ended; };
  C10dTransport transport(group, 0, 2, options);
  at::Tensor input = at::zeros({4}), output = at::zeros({8});
  const auto started = Clock::now();
  std::string error;
  try {
    transport.all_gather({"all_gather", "late", 3}, output, input);
  } catch (const CommError& caught) {
    error = caught.what();
  }
  return {error, Clock::now() - started};
}

TEST(C10dTransport, AnOperationThatNeedsNothingMoreCompletesThoughAPeerEnded) {
  for (const auto after : {10ms, 400ms}) {
    const auto [error, took] = gather(after, "rank 1 is gone");
    EXPECT_EQ(error, "");
    EXPECT_GE(took, after);
  }
}

TEST(C10dTransport, AnOperationThatNeverCompletesNamesThePeerThatEnded) {
  const auto [error, took] = gather(0ms, "rank 1 is gone");
  EXPECT_EQ(error, "[comm.all_gather 'late'] rank 1 is gone; this is rank 0 of 2 in step 3");
  EXPECT_GT(took, 900ms);
  EXPECT_LT(took, 3s);
}

}  // namespace
}  // namespace unshard::comm
