// Reads and writes of partitioned parameters through operators, each beside a dense twin.
#include "zero/touch.h"

#include <thread>

#include "unshard/core/error.h"
#include "zero/key.h"
#include "zero/store_testing.h"

namespace unshard {
namespace {

using testing::error_of;
using testing::numbers;
using testing::World;

class Touch : public testing::EveryWorld {};
UNSHARD_EVERY_WORLD(Touch);

TEST_P(Touch, KeepsWhatAParameterLooksLike) {
  run([](int, auto store) {
    auto w = numbers({4, 6}, 1).t().requires_grad_();  // dense, not contiguous
    const auto version = w._version();
    store->add(w, "w", true);
    EXPECT_EQ(w.sizes(), (std::vector<std::int64_t>{6, 4}));
    EXPECT_EQ(w.strides(), (std::vector<std::int64_t>{1, 6}));
    EXPECT_EQ(w.scalar_type(), at::kFloat);
    EXPECT_TRUE(w.requires_grad() && w.is_leaf());
    EXPECT_EQ(w._version(), version);
    EXPECT_EQ(w.storage().nbytes(), 24 * sizeof(float));
    EXPECT_TRUE(at::equal(w, numbers({4, 6}, 1).t()));
    EXPECT_EQ(w._version(), version);
  });
}

TEST_P(Touch, GivesTheSameGradientsAsDense) {
  run([](int, auto store) {
    auto w = numbers({5, 7}, 1).requires_grad_();
    auto b = numbers({5}, 2).requires_grad_();
    auto dense_w = w.detach().clone().requires_grad_();
    auto dense_b = b.detach().clone().requires_grad_();
    store->add(w, "w", true);
    store->add(b, "b", true);
    const auto loss = [](const at::Tensor& weight, const at::Tensor& bias) {
      const auto x = numbers({3, 7}, 4);
      const auto h = at::linear(x, weight, bias).tanh();
      return (at::linear(h.matmul(weight), weight) * weight.view({1, 35}).sum()).pow(2).sum() + weight.t().select(0, 2).sum();
    };
    const auto ours = loss(w, b), theirs = loss(dense_w, dense_b);
    EXPECT_TRUE(at::equal(ours, theirs));
    ours.backward();
    theirs.backward();
    EXPECT_TRUE(at::equal(w.grad(), dense_w.grad()));
    EXPECT_TRUE(at::equal(b.grad(), dense_b.grad()));
    EXPECT_EQ(store->stats().pinned, 0);
  });
}

TEST_P(Touch, RawAccessThrowsByNameBeforeAndAfterATouch) {
  run([](int, auto store) {
    auto w = numbers({4, 4}, 1);
    const auto alias = w.t();  // made before: has no key
    const auto detached = w.detach();
    store->add(w, "block.0.weight", true);
    const auto view = w.view({16});  // made after: has it
    for (int round = 0; round < 2; ++round) {
      for (const auto& tensor : {w, alias, detached, view}) {
        const auto error = error_of([&] { (void)tensor.data_ptr(); });
        EXPECT_NE(error.find("block.0.weight"), std::string::npos) << error;
        EXPECT_NE(error.find("clone()"), std::string::npos) << error;
      }
      EXPECT_NE(error_of([&] { at::matmul(alias, numbers({4}, 1)); }).find("block.0.weight"), std::string::npos);
      EXPECT_NE(error_of([&] { detached.add_(1); }).find("block.0.weight"), std::string::npos);
      EXPECT_TRUE(at::equal(view, numbers({16}, 1)));  // a touch; then again
    }
  });
}

// Every way an operator writes; all equal dense, at once on this rank and on every rank after the agreed point.
struct Write {
  const char* name;
  std::function<void(at::Tensor&)> apply;
};

const std::vector<Write>& writes() {
  static const std::vector<Write> all{
      {"zero_", [](at::Tensor& w) { w.zero_(); }},
      {"fill_", [](at::Tensor& w) { w.fill_(3); }},
      {"copy_",
       [](at::Tensor& w) {
         w.copy_(numbers({6, 5}, 7));
       }},
      {"copy_ broadcast", [](at::Tensor& w) { w.copy_(numbers({5}, 7)); }},
      {"copy_ of itself", [](at::Tensor& w) { w.copy_(w * 2); }},
      {"copy_ of a flipped view of itself", [](at::Tensor& w) { w.view({30}).copy_(w.flip(0).view({30})); }},
      {"mul_", [](at::Tensor& w) { w.mul_(3); }},
      {"add_ of itself", [](at::Tensor& w) { w.add_(w, 2); }},
      {"set part of a row", [](at::Tensor& w) { w.select(0, 1).slice(0, 1, 3).fill_(9); }},
      {"view of a view", [](at::Tensor& w) { w.t().narrow(0, 1, 3).select(1, 2).zero_(); }},
      {"data.normal_",
       [](at::Tensor& w) {
         auto generator = at::detail::createCPUGenerator(17);
         w.data().normal_(0, 1, generator);
       }},
      {"uniform_",
       [](at::Tensor& w) {
         auto generator = at::detail::createCPUGenerator(5);
         w.uniform_(-1, 1, generator);
       }},
      {"index_put_",
       [](at::Tensor& w) {
         w.index_put_({at::tensor({0, 2})}, at::tensor(8.0F));
       }},
      {"index_add_",
       [](at::Tensor& w) {
         w.index_add_(0, at::tensor({0, 2}), numbers({2, 5}, 3));
       }},
      {"masked_fill_", [](at::Tensor& w) { w.masked_fill_(w > 0, -1); }},
      {"scatter_",
       [](at::Tensor& w) {
         w.scatter_(1, at::tensor({0, 1}).view({1, 2}), 4.0);
       }},
      {"addmm_",
       [](at::Tensor& w) {
         w.addmm_(numbers({6, 2}, 1), numbers({2, 5}, 2));
       }},
      {"out=",
       [](at::Tensor& w) {
         at::mul_out(w, numbers({6, 5}, 2), at::tensor(2.0F));
       }},
      {"out= part",
       [](at::Tensor& w) {
         auto row = w.select(0, 3);
         at::mul_out(row, numbers({5}, 2), at::tensor(2.0F));
       }},
      {"clamp_", [](at::Tensor& w) { w.clamp_(-2, 2); }},
      {"foreach_mul_", [](at::Tensor& w) { at::_foreach_mul_(at::TensorList{w}, 2.0); }},
      {"foreach_add_ list",
       [](at::Tensor& w) {
         at::_foreach_add_(at::TensorList{w}, at::TensorList{numbers({6, 5}, 1)}, 2);
       }},
      {"foreach_zero_", [](at::Tensor& w) { at::_foreach_zero_(at::TensorList{w}); }},
      {"foreach_copy_",
       [](at::Tensor& w) {
         at::_foreach_copy_(at::TensorList{w}, at::TensorList{numbers({6, 5}, 8)});
       }},
      {"fused adam",
       [](at::Tensor& w) {
         at::Tensor grad = numbers({6, 5}, 2), m = at::zeros({6, 5}), v = at::zeros({6, 5}), step = at::ones({});
         std::vector<at::Tensor> ws{w}, gs{grad}, ms{m}, vs{v}, steps{step};
         at::_fused_adamw_(ws, gs, ms, vs, {}, steps, 0.1, 0.9, 0.99, 0.01, 1e-8, false, false);
       }},
      {"fused sgd",
       [](at::Tensor& w) {
         std::vector<at::Tensor> ws{w}, gs{numbers({6, 5}, 2)};
         at::_fused_sgd_(ws, gs, {}, 0.0, 0.0, 0.5, 0.0, false, false, true);
       }},
      {"embedding_renorm_",
       [](at::Tensor& w) {
         at::embedding_renorm_(w, at::tensor({1, 3}), 1.0, 2.0);
       }},
      {"inference mode",
       [](at::Tensor& w) {
         const c10::InferenceMode guard;
         w.add_(5);
       }},
  };
  return all;
}

TEST_P(Touch, EveryWriteEqualsDenseHereAndEverywhere) {
  run([](int rank, auto store) {
    std::vector<at::Tensor> parameters, twins;
    for (const auto& write : writes()) {
      parameters.push_back(numbers({6, 5}, 1));
      twins.push_back(numbers({6, 5}, 1));
      store->add(parameters.back(), write.name, true);
    }
    for (std::size_t i = 0; i < writes().size(); ++i) {
      writes()[i].apply(parameters[i]);
      writes()[i].apply(twins[i]);
      EXPECT_TRUE(at::equal(parameters[i], twins[i])) << writes()[i].name << " before settle";
    }
    const auto changed = store->settle();
    EXPECT_EQ(changed.size(), writes().size());
    EXPECT_EQ(store->stats().live_bytes, 0);
    EXPECT_EQ(store->stats().pinned, 0);
    for (std::size_t i = 0; i < writes().size(); ++i) {
      EXPECT_TRUE(at::equal(parameters[i], twins[i])) << writes()[i].name << " after settle";
      const auto& layout = store->info(static_cast<int>(i)).layout;
      EXPECT_TRUE(at::equal(store->own_slice(static_cast<int>(i)), twins[i].flatten().slice(0, layout.begin(rank), layout.end(rank))))
          << writes()[i].name;
    }
    EXPECT_TRUE(store->settle().empty());
  });
}

TEST_P(Touch, OperatorsThatReadNothingBringNothingIn) {
  run([](int, auto store) {
    auto w = numbers({6, 5}, 1).requires_grad_();
    store->add(w, "w", true);
    const auto touches = store->stats().touches;
    (void)at::empty_like(w);
    (void)at::zeros_like(w);
    (void)w.new_zeros({3});
    (void)w.detach().view({5, 6}).t().unsqueeze(0).select(1, 2);
    (void)at::result_type(w, at::tensor(1.0));
    (void)w.is_same_size(w);
    (void)at::_unsafe_view(w, {30});
    (void)at::unsafe_split(w, 2);
    (void)w.to(at::kFloat);
    w.detach().transpose_(0, 1);
    EXPECT_EQ(store->stats().touches, touches);
    EXPECT_EQ(store->stats().gathers, 0);
    EXPECT_TRUE(store->settle().empty());
    EXPECT_TRUE(at::equal(w.detach(), numbers({6, 5}, 1)));
  });
}

TEST_P(Touch, AnOperatorThatThrowsLeavesNoPinsAndNoGarbage) {
  run([](int, auto store) {
    auto w = numbers({6, 5}, 1);
    store->add(w, "w", true);
    EXPECT_NE(error_of([&] { at::matmul(w, numbers({6}, 1)); }), "");
    EXPECT_NE(error_of([&] { w.copy_(numbers({7, 9}, 1)); }), "");  // an overwrite that never happens
    EXPECT_NE(error_of([&] { w.add_(numbers({7, 9}, 1)); }), "");
    EXPECT_EQ(store->stats().pinned, 0);
    EXPECT_TRUE(at::equal(w, numbers({6, 5}, 1)));
    store->settle();
    EXPECT_TRUE(at::equal(w, numbers({6, 5}, 1)));
  });
}

TEST_P(Touch, CloneAndDeepCopyAreDense) {
  run([](int, auto store) {
    auto w = numbers({6, 5}, 1);
    store->add(w, "w", true);
    const auto copy = w.clone();
    EXPECT_FALSE(zero::has_touch_keys(copy));
    EXPECT_EQ(copy.const_data_ptr<float>()[0], numbers({6, 5}, 1).const_data_ptr<float>()[0]);
    EXPECT_EQ(store->find(copy), -1);
    EXPECT_EQ(store->find(w.view({30}).select(0, 3)), 0);
    int id = -1;
    EXPECT_EQ(store_of(w.t(), &id), store);
    EXPECT_EQ(id, 0);
    EXPECT_EQ(store_of(copy), nullptr);
  });
}

TEST_P(Touch, WholeAllowsRawAccessInsideOnly) {
  run([](int, auto store) {
    auto w = numbers({6, 5}, 1);
    auto plain = numbers({3}, 1);
    store->add(w, "w", true);
    {
      const Whole scope({w.t(), plain, w});
      const auto* data = w.const_data_ptr<float>();
      for (int i = 0; i < 30; ++i) EXPECT_EQ(data[i], numbers({30}, 1).const_data_ptr<float>()[i]);
      at::matmul(w, numbers({5}, 1));
      EXPECT_EQ(w.const_data_ptr<float>(), data);
      EXPECT_EQ(store->stats().pinned, 1);
    }
    EXPECT_EQ(store->stats().pinned, 0);
    EXPECT_NE(error_of([&] { (void)w.const_data_ptr(); }), "");
  });
}

TEST_P(Touch, FourThreadsTimes200ForwardsAreRight) {
  run([](int, auto store) {
    auto w = numbers({8, 8}, 1);
    auto b = numbers({8}, 2);
    const auto x = numbers({2, 8}, 3);
    const auto expected = at::linear(at::linear(x, w, b), w, b);
    store->add(w, "w", true);
    store->add(b, "b", true);
    std::atomic<int> wrong{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&] {
        for (int i = 0; i < 200; ++i) {
          if (!at::equal(at::linear(at::linear(x, w, b), w, b), expected)) ++wrong;
          if (i % 17 == 0) store->release_gathered();
        }
      });
    }
    for (auto& thread : threads) thread.join();
    EXPECT_EQ(wrong, 0);
    EXPECT_EQ(store->stats().pinned, 0);
  });
}

TEST_P(Touch, RanksMayTouchUnequally) {
  run([](int rank, auto store) {
    std::vector<at::Tensor> ws;
    for (int i = 0; i < 6; ++i) {
      ws.push_back(numbers({9, 3}, i));
      store->add(ws.back(), "w" + std::to_string(i), true);
    }
    // Each rank another number of reads, in another order; no rank waits for another.
    for (int i = 0; i < 40 * (rank + 1); ++i) {
      const int k = (i * (rank + 2) + rank) % 6;
      EXPECT_TRUE(at::equal(ws[static_cast<std::size_t>(k)] * 2, numbers({9, 3}, k) * 2));
      if (i % 5 == 0) store->release_gathered();
    }
    store->settle();
  });
}

TEST_P(Touch, SparseEmbeddingGradientEqualsDense) {
  run([](int, auto store) {
    auto w = numbers({10, 3}, 1).requires_grad_();
    auto dense = w.detach().clone().requires_grad_();
    store->add(w, "embedding", true);
    const auto tokens = at::tensor({1, 4, 4, 9});
    for (auto& weight : {w, dense}) at::embedding(weight, tokens, -1, false, /*sparse=*/true).pow(2).sum().backward();
    EXPECT_TRUE(w.grad().is_sparse());
    EXPECT_TRUE(at::equal(w.grad().to_dense(), dense.grad().to_dense()));
  });
}

TEST_P(Touch, AllDtypesAreBytes) {
  run([](int, auto store) {
    const std::vector<at::ScalarType> dtypes{at::kDouble, at::kHalf, at::kBFloat16,     at::kLong,
                                             at::kChar,   at::kBool, at::kComplexFloat, at::kFloat8_e4m3fn};
    std::vector<at::Tensor> ws;
    for (const auto dtype : dtypes) {
      ws.push_back(numbers({7, 3}, 2).to(dtype));
      store->add(ws.back(), c10::toString(dtype), true);
    }
    for (std::size_t i = 0; i < dtypes.size(); ++i) {
      EXPECT_TRUE(at::equal(ws[i].clone().view(at::kByte), numbers({7, 3}, 2).to(dtypes[i]).view(at::kByte))) << dtypes[i];
    }
  });
}

TEST(TouchOnce, TheNetCoversCompositeOperators) {
  zero::install_touch();
  const int before = zero::net_operators();
  EXPECT_GT(before, 500);
  zero::install_touch();
  EXPECT_EQ(zero::net_operators(), before);
}

// Inside __torch_dispatch__ the upper key is excluded; the lower must serve composite and plain kernels alike.
TEST_P(Touch, TheNetServesWhatTheUpperKeyDoesNotSee) {
  run([](int, auto store) {
    auto w = numbers({6, 5}, 1);
    auto twin = numbers({6, 5}, 1);
    store->add(w, "w", true);
    const c10::impl::ExcludeDispatchKeyGuard below_python(c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::Python) ^
                                                          c10::DispatchKeySet(c10::DispatchKeySet::FULL));
    const std::vector<std::function<at::Tensor(at::Tensor&)>> programs{
        [](at::Tensor& t) {
          return t.mm(numbers({5, 2}, 1));
        },
        [](at::Tensor& t) { return t.contiguous().add(1); },
        [](at::Tensor& t) {
          return t.index({at::tensor({1, 2})});
        },
        [](at::Tensor& t) { return at::layer_norm(t, {5}); },
        [](at::Tensor& t) { return t.to(at::kDouble); },
        [](at::Tensor& t) { return t.add_(1).clone(); },
        [](at::Tensor& t) {
          return t.copy_(numbers({6, 5}, 3)).clone();
        },
        [](at::Tensor& t) {
          at::_foreach_mul_(at::TensorList{t}, 2.0);
          return t.clone();
        },
        [](at::Tensor& t) {
          return at::linear(numbers({2, 5}, 1), t);
        },
    };
    for (std::size_t i = 0; i < programs.size(); ++i) EXPECT_TRUE(at::equal(programs[i](w), programs[i](twin))) << "program " << i;
  });
}

}  // namespace
}  // namespace unshard
