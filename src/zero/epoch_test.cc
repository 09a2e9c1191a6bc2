// A fetch that is under way while the value changes: what it brought is never read afterwards.
#include <mutex>
#include <thread>

#include "zero/service_testing.h"
#include "zero/state.h"
#include "zero/store_testing.h"

namespace unshard::zero {
namespace {

using testing::numbers;
using testing::on_hosts;
using testing::World;

/// A store's shard service whose next fetch, once told so, has its bytes and doesn't return.
class HeldService final : public testing::WrappedService {
 public:
  using WrappedService::WrappedService;
  static HeldService& put_into(ParameterStore& store) { return WrappedService::put_into<HeldService>(store); }

  void hold_next() {
    const std::lock_guard lock(mutex_);
    holding_ = true;
  }
  void wait_until_held() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return held_; });
  }

  void fetch(const std::vector<Request>& requests) override {
    inner_->fetch(requests);
    std::unique_lock lock(mutex_);
    if (!std::exchange(holding_, false)) return;
    held_ = true;
    hold(lock);
  }

 private:
  bool holding_ = false;
};

class FetchUnderWay : public testing::EveryWorld {
 protected:
  /// Rank 0 reads on another thread; its fetch ends after all ranks have run `change`. Then all read.
  /// \param change  (rank, store, parameter, its twin): the value becomes the twin's.
  void expect_new_value(const std::function<void(int, ParameterStore&, at::Tensor&, at::Tensor&)>& change) {
    run([&](int rank, auto store) {
      auto w = numbers({64}, 1), twin = numbers({64}, 1);
      store->add(w, "w", true);
      store->settle();
      auto& service = HeldService::put_into(*store);
      at::Tensor seen;
      std::thread reader;
      if (rank == 0) {
        service.hold_next();
        reader = std::thread([&] { seen = w * 1; });
        service.wait_until_held();
      }
      store->comm().barrier("a fetch is under way");
      change(rank, *store, w, twin);
      if (rank == 0) {
        service.let_go();
        reader.join();
        EXPECT_TRUE(at::equal(seen, twin)) << "what the fetch was for: " << seen;
      }
      for (int i = 0; i < 2; ++i) {
        const at::Tensor now = w * 1;
        EXPECT_TRUE(at::equal(now, twin)) << "rank " << rank << ": " << now;
      }
      EXPECT_EQ(store->stats().pinned, 0);
    });
  }
};
INSTANTIATE_TEST_SUITE_P(Worlds, FetchUnderWay,
                         ::testing::Values(World{2, false}, World{3, false}, on_hosts({1, 1}), on_hosts({2, 2}), on_hosts({1, 2})),
                         testing::world_name);

TEST_P(FetchUnderWay, WhileTheOptimizerUpdates) {
  expect_new_value([](int, ParameterStore& store, at::Tensor&, at::Tensor& twin) {
    store.settle();
    store.own_slice(0).add_(1);
    twin.add_(1);
    store.publish({1});
  });
}

TEST_P(FetchUnderWay, WhileOtherRanksSettleWhatTheyWrote) {
  expect_new_value([](int rank, ParameterStore& store, at::Tensor& w, at::Tensor& twin) {
    if (rank != 0) w.fill_(9);  // needs no old value, for which a rank of rank 0's host would wait
    store.settle();
    const auto own = store.info(0).layout.size(0);  // rank 0 keeps its piece, the others theirs
    twin.narrow(0, own, twin.numel() - own).fill_(9);
  });
}

TEST(HostsThatRelease, ARankThatAddsLateStillGivesItsPiece) {
  testing::with_stores(on_hosts({2, 1}), [](int rank, auto store) {
    if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(100));
    auto w = numbers({64}, 3);
    store->add(w, "w", true);
    store->release_all();
    EXPECT_TRUE(at::equal(w, numbers({64}, 3))) << "rank " << rank << ": " << w;
  });
}

}  // namespace
}  // namespace unshard::zero
