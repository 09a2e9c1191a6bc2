// The life of a store's parameters: added, settled, published, edited, replaced, released.
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <sys/wait.h>
#include <unistd.h>

#include <random>

#include "unshard/core/error.h"
#include "unshard/zero/parameter_store.h"
#include "zero/key.h"
#include "zero/store_testing.h"

namespace unshard {
namespace {

using testing::comm_options;
using testing::error_of;
using testing::numbers;
using testing::World;

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

class Store : public testing::EveryWorld {
 protected:
  int world() const { return GetParam().size; }
  bool is_private() const { return !GetParam().shared; }
};
UNSHARD_EVERY_WORLD(Store);

TEST_P(Store, BytesAtRestAreTheFormula) {
  run([&](int rank, auto store) {
    std::int64_t expected = 0, padding = 0;
    std::vector<at::Tensor> kept;
    for (const std::int64_t numel : {1, 2, 3, 7, 64, 1001}) {
      for (const auto dtype : {at::kFloat, at::kBFloat16}) {
        kept.push_back(numbers({numel}, 1, dtype));
        store->add(kept.back(), "p" + std::to_string(kept.size()), true);
        const std::int64_t piece = (numel + world() - 1) / world();
        const std::int64_t mine = std::max<std::int64_t>(0, std::min(numel, piece * (rank + 1)) - std::min(numel, piece * rank));
        expected += mine * static_cast<std::int64_t>(c10::elementSize(dtype));
        padding += (piece - mine) * static_cast<std::int64_t>(c10::elementSize(dtype));
      }
    }
    kept.push_back(numbers({5}, 1));
    store->add(kept.back(), "whole", false);
    EXPECT_EQ(store->bytes().parameters, expected + 20);
    EXPECT_EQ(store->bytes().padding, padding);
    EXPECT_EQ(store->stats().live_bytes, 0);
  });
}

TEST_P(Store, EachRankContributesItsOwnSliceOfItsOwnValue) {
  run([&](int rank, auto store) {
    auto w = at::full({10}, rank + 1.0F);
    store->add(w, "w", true);
    std::vector<at::Tensor> pieces;
    for (int r = 0; r < world(); ++r) pieces.push_back(at::full({store->info(0).layout.size(r)}, r + 1.0F));
    EXPECT_TRUE(at::equal(w, at::cat(pieces)));  // no agreed point in between: the read waits for the others
    EXPECT_TRUE(store->settle().empty());
  });
}

TEST_P(Store, RefusesWhatItCanNotKeepByName) {
  run([&](int, auto store) {
    const auto reject = [&](const at::Tensor& tensor, const char* reason) {
      const auto error = error_of([&] { store->add(tensor, "layer.bad", true); });
      EXPECT_TRUE(contains(error, "layer.bad") && contains(error, reason)) << error;
    };
    reject(numbers({3, 3}, 1).to_sparse(), "sparse");
    reject(at::empty({3}, at::TensorOptions(at::kMeta)), "meta");
    reject(numbers({3, 1}, 1).expand({3, 4}), "overlaps");
    reject(at::Tensor(), "undefined");
    EXPECT_EQ(store->size(), 0);
    auto w = numbers({4, 4}, 1);
    store->add(w, "layer.good", true);
    reject(w.t(), "layer.good");
  });
}

TEST_P(Store, RefusesAParameterOfAnotherStore) {
  run([&](int, auto store) {
    const std::shared_ptr<Communicator> comm(std::shared_ptr<void>(), &store->comm());
    auto other = ParameterStore::create(comm);
    auto w = numbers({4, 4}, 1), whole = numbers({3}, 1);
    store->add(w, "mine.w", true);
    store->add(whole, "mine.b", false);
    for (const auto& [tensor, name] : {std::pair{w, "mine.w"}, std::pair{whole, "mine.b"}}) {
      const auto error = error_of([&, t = tensor] { other->add(t, "yours", true); });
      EXPECT_TRUE(contains(error, name) && contains(error, "yours")) << error;
    }
    // Two stores side by side are fine.
    auto v = numbers({4, 4}, 2);
    other->add(v, "v", true);
    EXPECT_TRUE(at::equal(w.mm(v), numbers({4, 4}, 1).mm(numbers({4, 4}, 2))));
    store->comm().barrier("both stores were read");
  });
}

TEST_P(Store, TiedParametersAreOneEntry) {
  run([&](int, auto store) {
    auto w = numbers({4, 4}, 1).requires_grad_();
    EXPECT_EQ(store->add(w, "embedding", true), 0);
    EXPECT_EQ(store->add(w, "head", true), 0);        // the same tensor
    auto same_storage = w.detach().requires_grad_();  // another Parameter on the same storage
    EXPECT_EQ(store->add(same_storage, "head", true), 0);
    EXPECT_EQ(store->size(), 1);
    {
      const at::NoGradGuard no_grad;
      w.add_(1);
    }
    EXPECT_TRUE(at::equal(same_storage, numbers({4, 4}, 1) + 1));
    store->settle();
    EXPECT_TRUE(at::equal(same_storage, numbers({4, 4}, 1) + 1));
    store->release_all();
    EXPECT_EQ(w.const_data_ptr(), same_storage.const_data_ptr());
  });
}

TEST_P(Store, TiedThroughAStorageThatWasTiedBeforeAdd) {
  run([&](int, auto store) {
    auto w = numbers({4, 4}, 1);
    auto tied = w.detach();
    EXPECT_EQ(store->add(w, "a", true), 0);
    EXPECT_EQ(store->add(tied, "b", true), 0);
    EXPECT_TRUE(at::equal(tied, numbers({4, 4}, 1)));
  });
}

TEST_P(Store, SlicesOfOneStorageEachGetTheirOwn) {
  run([&](int, auto store) {
    const auto flat = numbers({24}, 1);
    auto a = flat.slice(0, 0, 8).view({2, 4}), b = flat.slice(0, 8, 20).view({3, 4}), c = flat.slice(0, 20, 24);
    store->add(a, "a", true);
    EXPECT_TRUE(at::equal(b, numbers({24}, 1).slice(0, 8, 20).view({3, 4})));  // not emptied under its feet
    store->add(b, "b", true);
    store->add(c, "c", false);
    EXPECT_TRUE(at::equal(at::cat({a.view({8}), b.view({12}), c}), numbers({24}, 1)));
    a.zero_();
    b.fill_(2);
    store->settle();
    EXPECT_TRUE(at::equal(at::cat({a.view({8}), b.view({12}), c}),
                          at::cat({at::zeros({8}), at::full({12}, 2.0F), numbers({24}, 1).slice(0, 20, 24)})));
  });
}

TEST_P(Store, EmptyAndZeroDimensionalParameters) {
  run([&](int, auto store) {
    auto empty = at::empty({0, 3}), scalar = at::tensor(5.0F).squeeze();
    EXPECT_FALSE(store->info(store->add(empty, "empty", true)).partitioned);
    EXPECT_TRUE(store->info(store->add(scalar, "scalar", true)).partitioned);
    EXPECT_EQ(scalar.item<float>(), 5.0F);
    scalar.mul_(2);
    EXPECT_EQ(store->settle(), std::vector<int>{1});
    EXPECT_EQ(scalar.item<float>(), 10.0F);
    EXPECT_EQ(store->own_slice(0).numel(), 0);
    store->publish({1, 1});
    EXPECT_EQ(scalar.item<float>(), 10.0F);
  });
}

TEST_P(Store, ChannelsLastKeepsItsOrder) {
  run([&](int rank, auto store) {
    const auto value = numbers({4, 3, 2, 2}, 1);
    for (const bool partitioned : {true, false}) {
      auto w = value.contiguous(at::MemoryFormat::ChannelsLast);
      const int id = store->add(w, partitioned ? "p" : "k", partitioned);
      EXPECT_TRUE(w.is_contiguous(at::MemoryFormat::ChannelsLast));
      EXPECT_TRUE(at::equal(w, value));
      const auto in_order = value.permute({0, 2, 3, 1}).flatten();  // storage order
      const auto& layout = store->info(id).layout;
      EXPECT_TRUE(at::equal(store->own_slice(id), in_order.slice(0, layout.begin(rank), layout.end(rank))));
      const auto whole = store->whole_if_local(id);
      EXPECT_EQ(whole.defined(), !(partitioned && is_private()));
      EXPECT_TRUE(!whole.defined() || at::equal(whole, in_order));
    }
  });
}

TEST_P(Store, PublishShowsWhatTheOptimizerWroteAndBumpsVersions) {
  run([&](int rank, auto store) {
    StoreOptions options;
    options.allgather_bucket_numel = 16;  // several buckets, parameters cut in the middle
    store->set_options(options);
    std::vector<at::Tensor> ws;
    for (int i = 0; i < 6; ++i) {
      ws.push_back(numbers({i + 3, 5}, i, i % 3 == 2 ? at::kBFloat16 : at::kFloat));
      store->add(ws.back(), "w" + std::to_string(i), i % 2 == 0);
    }
    for (const auto& w : ws) (void)at::sum(w);  // gathered copies that must go
    store->comm().barrier("all ranks read the values before");
    std::vector<std::uint8_t> updated{1, 1, 0, 1, 1, 1};
    std::vector<std::uint32_t> versions;
    for (int i = 0; i < 6; ++i) {
      versions.push_back(static_cast<std::uint32_t>(ws[static_cast<std::size_t>(i)]._version()));
      if (updated[static_cast<std::size_t>(i)]) store->own_slice(i).mul_(2);
    }
    store->publish(updated);
    for (std::size_t i = 0; i < 6; ++i) {
      const auto before = numbers({static_cast<std::int64_t>(i) + 3, 5}, static_cast<std::int64_t>(i), ws[i].scalar_type());
      EXPECT_TRUE(at::equal(ws[i], updated[i] ? before * 2 : before)) << i;
      EXPECT_EQ(ws[i]._version(), versions[i] + updated[i]) << i;
    }
    store->comm().barrier("all ranks compared");
    store->own_slice(2).zero_();
    store->publish_one(2);
    EXPECT_TRUE(at::equal(ws[2], at::zeros_like(ws[2])));
    EXPECT_TRUE(store->settle().empty());  // the optimizer's writes are not the user's
    (void)rank;
  });
}

TEST_P(Store, AGraphKeptAcrossAnUpdateRaisesTorchsError) {
  run([&](int, auto store) {
    auto w = numbers({4, 4}, 1).requires_grad_();
    store->add(w, "w", true);
    const auto loss = w.mm(w).sum();
    store->comm().barrier("all ranks ran forward");
    store->own_slice(0).mul_(2);
    store->publish({1});
    EXPECT_TRUE(contains(error_of([&] { loss.backward(); }), "modified by an inplace operation"));
  });
}

TEST_P(Store, ParametersWrittenOnOneRankOnlyKeepThatRanksSlice) {
  run([&](int rank, auto store) {
    auto w = numbers({9}, 1), v = numbers({9}, 2);
    store->add(w, "w", true);
    store->add(v, "v", true);
    store->settle();
    if (rank == 0) w.fill_(100);
    // Its own reads are served from its copy; nobody else sees a mix.
    EXPECT_TRUE(at::equal(w, rank == 0 ? at::full({9}, 100.0F) : numbers({9}, 1)));
    EXPECT_EQ(store->settle(), std::vector<int>{0});  // everywhere, also where it wasn't written
    auto expected = numbers({9}, 1);
    expected.slice(0, 0, store->info(0).layout.end(0)).fill_(100);
    EXPECT_TRUE(at::equal(w, expected));
    EXPECT_TRUE(at::equal(v, numbers({9}, 2)));
  });
}

TEST_P(Store, DebugModeRefusesDifferentValues) {
  StoreOptions options;
  options.debug = true;
  run(options, [&](int rank, auto store) {
    auto w = numbers({9}, 1);
    store->add(w, "layers.3.weight", true);
    w.fill_(5);
    EXPECT_EQ(store->settle(), std::vector<int>{0});  // the same value everywhere
    w.fill_(rank);
    const auto error = error_of([&] { store->settle(); });
    EXPECT_EQ(contains(error, "layers.3.weight") && contains(error, "different values"), world() > 1) << error;
  });
}

TEST_P(Store, AnEditTakesTheModifiersValueEverywhere) {
  run([&](int rank, auto store) {
    auto w = numbers({3, 5}, 1), b = numbers({4}, 2);
    store->add(w, "w", true);
    store->add(b, "b", false);
    const int modifier = world() - 1;
    const float fill = static_cast<float>(10 + rank);
    store->begin_edit({0, 1});
    for (std::int64_t i = 0; i < w.numel(); ++i) w.mutable_data_ptr<float>()[i] = fill;  // below the dispatcher
    b.fill_(fill);
    EXPECT_TRUE(at::equal(w, at::full({3, 5}, fill)));  // each rank sees its own until the end
    EXPECT_TRUE(contains(error_of([&] { store->begin_edit({0}); }), "'w'"));
    EXPECT_TRUE(contains(error_of([&] { store->settle(); }), "'w'"));
    store->end_edit({0, 1}, modifier);
    EXPECT_TRUE(at::equal(w, at::full({3, 5}, 10.0F + static_cast<float>(modifier))));
    EXPECT_TRUE(at::equal(b, at::full({4}, 10.0F + static_cast<float>(modifier))));
    EXPECT_NE(error_of([&] { (void)w.data_ptr(); }), "");
    EXPECT_EQ(store->settle(), (std::vector<int>{0, 1}));
    EXPECT_EQ(store->stats().live_bytes, 0);
    EXPECT_EQ(store->stats().pinned, 0);
  });
}

TEST_P(Store, ReplacedStoragesAreAdoptedAgain) {
  run([&](int rank, auto store) {
    auto w = numbers({4, 4}, 1).requires_grad_(), b = numbers({6}, 2);
    store->add(w, "w", true);
    store->add(b, "b", false);
    auto x = numbers({4, 4}, 7);
    w.set_data(x);
    b.set_data(numbers({6}, 8));
    EXPECT_TRUE(at::equal(w.detach(), x));
    EXPECT_EQ(store->settle(), (std::vector<int>{0, 1}));
    EXPECT_TRUE(zero::has_touch_keys(w));
    EXPECT_NE(error_of([&] { (void)w.data_ptr(); }), "");
    x.fill_(99);  // the user's own tensor stays the user's own
    EXPECT_EQ(x.const_data_ptr<float>()[0], 99.0F);
    EXPECT_TRUE(at::equal(w.detach(), numbers({4, 4}, 7)));
    const auto& layout = store->info(0).layout;
    EXPECT_TRUE(at::equal(store->own_slice(0), numbers({16}, 7).slice(0, layout.begin(rank), layout.end(rank))));
    EXPECT_EQ(store->find(b), 1);

    w.set_data(w.detach().t());  // transposed view of itself
    EXPECT_EQ(store->settle(), std::vector<int>{0});
    EXPECT_TRUE(at::equal(w.detach(), numbers({4, 4}, 7).t()));
    EXPECT_TRUE(w.is_contiguous());

    {
      const at::NoGradGuard no_grad;
      w.set_(numbers({4, 4}, 9));  // keeps the key, changes the storage
    }
    EXPECT_TRUE(at::equal(w.detach(), numbers({4, 4}, 9)));
    EXPECT_EQ(store->settle(), std::vector<int>{0});
    EXPECT_TRUE(at::equal(w.detach(), numbers({4, 4}, 9)));
    EXPECT_TRUE(store->settle().empty());
  });
}

TEST_P(Store, AnotherShapeOrDtypeIsAnErrorByName) {
  run([&](int, auto store) {
    auto w = numbers({4, 4}, 1), b = numbers({6}, 2);
    store->add(w, "w", true);
    store->add(b, "b", false);
    w.set_data(numbers({4, 4}, 7).to(at::kDouble));
    EXPECT_TRUE(contains(error_of([&] { store->check_storages(); }), "'w'"));
    w.set_data(numbers({4, 4}, 1));
    b.set_data(numbers({7}, 1));
    const auto error = error_of([&] { store->check_storages(); });
    EXPECT_TRUE(contains(error, "'b'") && contains(error, "[6]") && contains(error, "[7]")) << error;
    b.set_data(numbers({6}, 2));
    store->check_storages();
    EXPECT_TRUE(at::equal(w, numbers({4, 4}, 1)));
  });
}

TEST_P(Store, ReleaseGivesPlainTensorsAndKeepsViewsValid) {
  run([&](int, auto store) {
    auto w = numbers({4, 4}, 1).requires_grad_();
    store->add(w, "w", true);
    {
      const at::NoGradGuard no_grad;
      w.mul_(3);
    }
    store->settle();
    const auto view = w.t();  // lives on with the key
    const auto loss = w.mm(w).sum();
    store->release_all();
    store->release_all();
    EXPECT_FALSE(zero::has_touch_keys(w));
    EXPECT_EQ(w.const_data_ptr<float>()[0], numbers({4, 4}, 1).const_data_ptr<float>()[0] * 3);
    EXPECT_TRUE(at::equal(view, (numbers({4, 4}, 1) * 3).t()));
    loss.backward();
    auto twin = (numbers({4, 4}, 1) * 3).requires_grad_();
    twin.mm(twin).sum().backward();
    EXPECT_TRUE(at::equal(w.grad(), twin.grad()));
    EXPECT_EQ(store_of(w), nullptr);
    EXPECT_TRUE(contains(error_of([&] { store->add(numbers({2}, 1), "late", true); }), "late"));
  });
}

TEST_P(Store, DestroyedWithoutReleaseGivesValuesOrAnErrorByName) {
  const auto world_of = GetParam();
  testing::run_world(world_of, [&](int, Communicator& comm) {
    auto w = numbers({4, 4}, 1);
    {
      auto store = ParameterStore::create(std::shared_ptr<Communicator>(std::shared_ptr<void>(), &comm));
      store->add(w, "blocks.1.w", true);
      store->settle();
      comm.barrier("all ranks added");
    }
    const auto error = error_of([&] { EXPECT_TRUE(at::equal(w, numbers({4, 4}, 1))); });
    EXPECT_EQ(contains(error, "blocks.1.w") && contains(error, "destroyed"), is_private()) << error;
    EXPECT_EQ(error.empty(), !is_private());
    comm.barrier("end");
  });
}

TEST_P(Store, LockstepWritesKeepNoWholeModelAndStayEqual) {
  run([&](int, auto store) {
    store->set_lockstep_writes(true);
    std::vector<at::Tensor> ws, twins;
    std::int64_t largest = 0;
    for (int i = 0; i < 20; ++i) {
      auto w = at::zeros({i + 4, 6}), twin = at::zeros({i + 4, 6});
      store->add(w, "w" + std::to_string(i), true);
      for (auto* tensor : {&w, &twin}) {
        auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(i));
        tensor->normal_(0, 1, generator);
        tensor->mul_(2);
        tensor->select(0, 1).zero_();
        tensor->add_(tensor->sum());  // reads what every rank wrote
      }
      largest = std::max<std::int64_t>(largest, static_cast<std::int64_t>(w.storage().nbytes()));
      ws.push_back(w);
      twins.push_back(twin);
    }
    EXPECT_LE(store->stats().peak_live_bytes, world() == 1 ? 0 : is_private() ? INT64_MAX : largest);
    store->release_gathered();
    EXPECT_EQ(store->stats().live_bytes, 0);
    store->set_lockstep_writes(false);
    for (std::size_t i = 0; i < ws.size(); ++i) EXPECT_TRUE(at::equal(ws[i], twins[i])) << i;
    EXPECT_EQ(store->settle().size(), ws.size());
    for (std::size_t i = 0; i < ws.size(); ++i) EXPECT_TRUE(at::equal(ws[i], twins[i])) << i;
  });
}

TEST_P(Store, LockstepSurvivesRanksOfDifferentSpeed) {
  run([&](int rank, auto store) {
    std::mt19937 random(static_cast<unsigned>(rank));
    store->set_lockstep_writes(true);
    auto w = numbers({33}, 1), twin = numbers({33}, 1);
    store->add(w, "w", true);
    for (int i = 0; i < 60; ++i) {
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
      for (auto* tensor : {&w, &twin}) {
        if (i % 3 == 0)
          tensor->fill_(i);
        else if (i % 3 == 1)
          tensor->add_(numbers({33}, i));
        else
          tensor->sub_(tensor->flip(0));
      }
      const bool reads = static_cast<int>(random() % 3) == rank % 3;  // unequal between ranks
      ASSERT_TRUE(!reads || at::equal(w, twin)) << i;
    }
    EXPECT_TRUE(at::equal(w, twin));
    store->settle();
    EXPECT_TRUE(at::equal(w, twin));
  });
}

TEST_P(Store, RenameChangesTheMessage) {
  run([&](int, auto store) {
    auto w = numbers({4}, 1);
    store->add(w, "weight", true);
    store->rename(0, "model.layers.7.weight");
    EXPECT_TRUE(contains(error_of([&] { (void)w.data_ptr(); }), "model.layers.7.weight"));
    EXPECT_EQ(store->info(0).name, "model.layers.7.weight");
  });
}

TEST_P(Store, TheObserverSeesEveryTouch) {
  run([&](int, auto store) {
    auto w = numbers({4, 4}, 1), v = numbers({4, 4}, 1);
    store->add(w, "w", true);
    store->add(v, "v", true);
    std::vector<int> seen;
    store->set_touch_observer([&](int id) { seen.push_back(id); });
    (void)at::add(w, v);
    (void)at::exp(v);
    (void)w.t();
    store->set_touch_observer(nullptr);
    (void)at::exp(v);
    EXPECT_EQ(seen, (std::vector<int>{0, 1, 1}));
    EXPECT_EQ(store->stats().touches, 4);
  });
}

TEST_P(Store, InferenceGathersOnceAndNotAgain) {
  run([&](int, auto store) {
    std::vector<at::Tensor> ws;
    for (int i = 0; i < 5; ++i) {
      ws.push_back(numbers({7, 3}, i));
      store->add(ws.back(), "w" + std::to_string(i), true);
    }
    StoreOptions options;
    options.max_live_numel = 21;  // one of them: inference keeps all the same
    store->set_options(options);
    store->enter_inference();
    const auto gathers = store->stats().gathers;
    const auto& hosts = GetParam().hosts;
    if (hosts.empty()) {
      EXPECT_EQ(gathers, is_private() ? 5 : 0);
    } else {
      EXPECT_LE(gathers, 5);  // those of a host make them together
      auto total = at::full({1}, gathers, at::kLong);
      store->comm().all_reduce(total);
      EXPECT_EQ(total.template item<std::int64_t>(), 5 * static_cast<std::int64_t>(hosts.size()));
    }
    for (int round = 0; round < 3; ++round) {
      for (int i = 0; i < 5; ++i) EXPECT_TRUE(at::equal(ws[static_cast<std::size_t>(i)], numbers({7, 3}, i)));
    }
    EXPECT_EQ(store->stats().gathers, gathers);
    store->leave_inference();
    EXPECT_EQ(store->stats().live_bytes, 0);
  });
}

// What Python's torch.autocast does. Its cache is one for all threads: ranks take turns.
class Autocast {
 public:
  Autocast() : turn_(mutex()) {
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::increment_nesting();
  }
  ~Autocast() {
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
  }

 private:
  static std::mutex& mutex() {
    static std::mutex mutex;
    return mutex;
  }
  std::lock_guard<std::mutex> turn_;
};

// Copies of fp32 parameters that autocast makes are recipes, not bytes.
TEST_P(Store, AutocastGivesDenseGradients) {
  run([&](int, auto store) {
    auto w = numbers({8, 8}, 1).requires_grad_(), twin = numbers({8, 8}, 1).requires_grad_();
    store->add(w, "w", true);
    const auto x = numbers({2, 8}, 3);
    store->settle();
    std::vector<at::Tensor> losses;
    {
      const Autocast region;
      for (auto& weight : {w, twin}) losses.push_back(at::linear(at::linear(x, weight).tanh(), weight).to(at::kFloat).sum());
    }
    EXPECT_TRUE(at::equal(losses[0], losses[1]));
    losses[0].backward();
    losses[1].backward();
    EXPECT_TRUE(at::equal(w.grad(), twin.grad()));
    EXPECT_EQ(store->stats().pinned, 0);
  });
}

// Bytes of the tensors a graph saved, by way of the storages it keeps: here seen through the cast tensor itself.
TEST_P(Store, AutocastKeepsNoBytesBetweenForwardAndBackward) {
  run([&](int, auto store) {
    auto w = numbers({8, 8}, 1).requires_grad_();
    store->add(w, "layer.w", true);
    store->settle();
    auto x = numbers({2, 8}, 3).requires_grad_();
    at::Tensor loss, saved;
    {
      const Autocast region;
      loss = at::linear(x, w).to(at::kFloat).sum();
      // The cache hands out the same cast again; a view of it shares its storage.
      saved = at::autocast::cached_cast(at::kBFloat16, w, at::kCPU);
    }
    const auto error = error_of([&] { (void)saved.const_data_ptr(); });
    EXPECT_TRUE(contains(error, "layer.w")) << error;
    EXPECT_TRUE(at::equal(saved.detach(), numbers({8, 8}, 1).to(at::kBFloat16)));  // an operator casts again
    EXPECT_NE(error_of([&] { (void)saved.const_data_ptr(); }), "");
    loss.backward();
    EXPECT_TRUE(at::equal(x.grad(), at::ones({2, 8}).matmul(numbers({8, 8}, 1))));
    store->release_all();
    EXPECT_TRUE(at::equal(saved.detach(), numbers({8, 8}, 1).to(at::kBFloat16)));  // plain now
  });
}

TEST_P(Store, AutocastGraphAcrossAnUpdateRaises) {
  run([&](int, auto store) {
    auto w = numbers({8, 8}, 1).requires_grad_();
    store->add(w, "w", true);
    store->settle();
    auto x = numbers({2, 8}, 3).requires_grad_();
    at::Tensor loss;
    {
      const Autocast region;
      loss = at::linear(x, w).to(at::kFloat).sum();
    }
    store->comm().barrier("all ranks ran forward");
    store->own_slice(0).mul_(2);
    store->publish({1});
    EXPECT_TRUE(contains(error_of([&] { loss.backward(); }), "modified by an inplace operation"));
  });
}

TEST_P(Store, TheUsersOwnCastIsASnapshot) {
  run([&](int, auto store) {
    auto w = numbers({8, 8}, 1);
    store->add(w, "w", true);
    const auto snapshot = w.to(at::kBFloat16);
    store->comm().barrier("all ranks took their snapshot");
    store->own_slice(0).mul_(2);
    store->publish({1});
    EXPECT_TRUE(at::equal(snapshot, numbers({8, 8}, 1).to(at::kBFloat16)));
  });
}

TEST(StoreOfOne, ATouchInAForkedChildRaisesByName) {
  testing::with_stores({1, true}, [&](int, auto store) {
    auto w = numbers({4, 4}, 1);
    store->add(w, "loader.w", true);
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      const auto error = error_of([&] { (void)at::exp(w); });
      ::_exit(contains(error, "loader.w") && contains(error, "forked") ? 0 : 1);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    EXPECT_TRUE(at::equal(w, numbers({4, 4}, 1)));
  });
}

TEST(StoreOfOne, WritesInPlaceWithoutACopy) {
  testing::with_stores({1, true}, [&](int, auto store) {
    auto w = numbers({64}, 1);
    const auto* before = w.const_data_ptr();
    store->add(w, "w", true);
    w.mul_(2);
    EXPECT_EQ(store->stats().peak_live_bytes, 0);
    EXPECT_TRUE(at::equal(store->own_slice(0), numbers({64}, 1) * 2));
    EXPECT_EQ(store->settle(), std::vector<int>{0});
    store->release_all();
    EXPECT_EQ(w.const_data_ptr(), before);
  });
}

}  // namespace
}  // namespace unshard
