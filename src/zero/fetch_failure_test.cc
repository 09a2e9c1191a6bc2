// A fetch that fails while others wait for what it brings: they have its error, which names the rank that doesn't answer, and none of them
// asks that rank again and waits for the time-out anew.
#include <algorithm>
#include <barrier>
#include <climits>
#include <mutex>
#include <thread>

#include "unshard/core/error.h"
#include "zero/service_testing.h"
#include "zero/state.h"
#include "zero/store_testing.h"

namespace unshard::zero {
namespace {

using testing::error_of;
using testing::numbers;
using testing::on_hosts;
using testing::World;

constexpr const char* kSilent = "rank 7 gives no sign of life";

/// A store's shard service whose fetches of parameters from `first` on, once told so, hang until let_go() and then fail.
class DeadService final : public testing::WrappedService {
 public:
  explicit DeadService(std::unique_ptr<ShardService> inner) : WrappedService(std::move(inner)) { held_ = true; }
  static DeadService& put_into(ParameterStore& store) { return WrappedService::put_into<DeadService>(store); }

  void die(int first = 0) {
    const std::lock_guard lock(mutex_);
    dead_from_ = first;
  }
  void wait_until_asked() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return asked_ > 0; });
  }
  int asked() {
    const std::lock_guard lock(mutex_);
    return asked_;
  }

  void fetch(const std::vector<Request>& requests) override {
    {
      std::unique_lock lock(mutex_);
      if (std::any_of(requests.begin(), requests.end(), [this](const Request& one) { return one.id >= dead_from_; })) {
        ++asked_;
        hold(lock);
        throw CommError(kSilent);
      }
    }
    inner_->fetch(requests);
  }

 private:
  int dead_from_ = INT_MAX, asked_ = 0;
};

void nap() { std::this_thread::sleep_for(std::chrono::milliseconds(100)); }

void expect_names(const std::string& error, const std::string& parameter) {
  EXPECT_NE(error.find(kSilent), std::string::npos) << error;
  EXPECT_NE(error.find("'" + parameter), std::string::npos) << error;
}

/// One store a rank, and a last meeting that needs no communicator: those of the ranks that failed are of no use any more.
void with_failing_stores(const World& world, const std::function<void(int, ParameterStore&, const std::function<void()>& meet)>& fn) {
  std::barrier<> meeting(world.size);
  testing::run_world(world, [&](int rank, Communicator& comm) {
    auto store = ParameterStore::create(std::shared_ptr<Communicator>(std::shared_ptr<void>(), &comm));
    fn(rank, *store, [&] { meeting.arrive_and_wait(); });
    meeting.arrive_and_wait();
  });
}

class FailedFetch : public ::testing::TestWithParam<World> {};
INSTANTIATE_TEST_SUITE_P(Worlds, FailedFetch, ::testing::Values(World{2, false}, on_hosts({1, 1}), on_hosts({2, 1})), testing::world_name);

TEST_P(FailedFetch, OfOneThreadIsTheErrorOfTheOtherThatWaitsForIt) {
  with_failing_stores(GetParam(), [](int rank, ParameterStore& store, const auto& meet) {
    auto w = numbers({64}, 1);
    store.add(w, "blocks.1.w", true);
    store.settle();
    meet();
    if (rank == 0) {
      auto& service = DeadService::put_into(store);
      service.die();
      std::string errors[2];
      std::thread first([&] { errors[0] = error_of([&] { (void)at::exp(w); }); });
      service.wait_until_asked();
      std::thread second([&] { errors[1] = error_of([&] { (void)at::exp(w); }); });
      nap();
      service.let_go();
      first.join();
      second.join();
      for (const auto& error : errors) expect_names(error, "blocks.1.w");
      EXPECT_EQ(service.asked(), 1);
      EXPECT_EQ(store.stats().pinned, 0);
    }
    meet();
  });
}

class FailedFetchAhead : public FailedFetch {};
INSTANTIATE_TEST_SUITE_P(Worlds, FailedFetchAhead, ::testing::Values(World{2, false}, on_hosts({1, 1}), on_hosts({1, 2})),
                         testing::world_name);

TEST_P(FailedFetchAhead, IsTheErrorOfTheTouchThatWaitsForIt) {
  with_failing_stores(GetParam(), [](int rank, ParameterStore& store, const auto& meet) {
    std::vector<at::Tensor> parameters;
    for (int i = 0; i < 4; ++i) store.add(parameters.emplace_back(numbers({64}, i)), "p" + std::to_string(i), true);
    const auto update = [&] {
      store.settle();
      store.publish(std::vector<std::uint8_t>(parameters.size(), 1));
    };
    for (int step = 0; step < 3; ++step) {
      store.begin_step(step);
      for (auto& p : parameters) (void)at::exp(p);
      store.settle();  // nothing is under way
      if (step < 2) update();
    }
    auto& service = DeadService::put_into(store);
    meet();
    update();
    if (rank == 0) service.die(1);  // private memory fetches ahead from the first touch on, which brings in p0 itself
    store.begin_step(3);
    if (rank == 0) {
      std::string error;
      std::thread touches([&] {
        error = error_of([&] {
          for (auto& p : parameters) (void)at::exp(p);
        });
      });
      service.wait_until_asked();
      nap();
      const int asked = service.asked();
      service.let_go();
      touches.join();
      expect_names(error, "p");
      EXPECT_EQ(service.asked(), asked) << "the touch asked again";
    }
    meet();
  });
}

// One copy a host: a rank waits for what another one brings in.
TEST(FailedFetchOfAHost, OfOneRankIsTheErrorOfTheOtherThatWaitsForIt) {
  with_failing_stores(on_hosts({2, 1}), [](int rank, ParameterStore& store, const auto& meet) {
    auto w = numbers({64}, 1);
    store.add(w, "blocks.1.w", true);
    store.settle();
    auto& service = DeadService::put_into(store);
    if (rank < 2) service.die();
    meet();
    std::thread first;
    if (rank == 0) {
      first = std::thread([&] { expect_names(error_of([&] { (void)at::exp(w); }), "blocks.1.w"); });
      service.wait_until_asked();
    }
    meet();
    std::thread second;
    if (rank == 1) second = std::thread([&] { expect_names(error_of([&] { (void)at::exp(w); }), "blocks.1.w"); });
    nap();
    meet();
    service.let_go();
    if (first.joinable()) first.join();
    if (second.joinable()) second.join();
    if (rank == 1) {
      EXPECT_EQ(service.asked(), 0) << "it asked the silent rank itself";
    }
    meet();
  });
}

}  // namespace
}  // namespace unshard::zero
