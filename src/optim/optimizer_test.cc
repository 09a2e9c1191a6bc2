// Facts about the built-in optimizers: equality with torch's formulas in double, state, steps, errors.
#include "unshard/optim/optimizer.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "optim/aten_update.h"
#include "unshard/core/error.h"

namespace unshard {
namespace {

using ::testing::HasSubstr;

/// torch.optim's formulas, spelled out with operators in double.
struct Reference {
  std::string type;
  GroupOptions o;
  at::Tensor p, first, second;
  std::int64_t steps = 0;

  void step(at::Tensor g) {
    ++steps;
    if (o.maximize) g = -g;
    if (type == "adamw" || type == "lion") {
      p = p * (1 - o.lr * o.weight_decay);
    } else {
      g = g + o.weight_decay * p;
    }
    if (type == "adam" || type == "adamw") return adam(g);
    if (type == "sgd") return sgd(g);
    if (type == "adagrad") {
      first = first + g * g;
      p = p - o.lr / (1 + static_cast<double>(steps - 1) * o.lr_decay) * g / (first.sqrt() + o.eps);
      return;
    }
    p = p - o.lr * at::sign(o.beta1 * first + (1 - o.beta1) * g);
    first = o.beta2 * first + (1 - o.beta2) * g;
  }
  void adam(const at::Tensor& g) {
    const double c1 = o.bias_correction ? 1 - std::pow(o.beta1, steps) : 1, c2 = o.bias_correction ? 1 - std::pow(o.beta2, steps) : 1;
    first = o.beta1 * first + (1 - o.beta1) * g;
    second = o.beta2 * second + (1 - o.beta2) * g * g;
    p = p - o.lr / c1 * first / (second.sqrt() / std::sqrt(c2) + o.eps);
  }
  void sgd(const at::Tensor& g) {
    if (o.momentum == 0) {
      p = p - o.lr * g;
      return;
    }
    first = steps == 1 ? g.clone() : o.momentum * first + (1 - o.dampening) * g;
    p = p - o.lr * (o.nesterov ? g + o.momentum * first : first);
  }
};

GroupOptions variant(int index) {
  GroupOptions o;
  o.lr = index % 2 == 0 ? 1e-3 : 3e-2;
  o.weight_decay = index % 3 == 0 ? 0 : 0.1;
  o.beta1 = index % 4 == 3 ? 0.4 : 0.9;
  o.beta2 = index % 2 == 0 ? 0.999 : 0.95;
  o.eps = index % 5 == 0 ? 1e-3 : 1e-8;
  o.momentum = index % 3 == 1 ? 0 : 0.9;
  o.nesterov = index % 3 == 2;
  o.dampening = index % 6 == 3 ? 0.25 : 0;
  o.lr_decay = index % 2 == 0 ? 0 : 0.1;
  o.initial_accumulator = index % 4 == 1 ? 0.5 : 0;
  o.bias_correction = index % 7 != 6;
  o.maximize = index % 8 == 7;
  return o;
}
const char* const kTypes[] = {"adam", "adamw", "sgd", "adagrad", "lion"};

at::Tensor unaligned(std::int64_t n, at::ScalarType dtype) { return at::zeros({n + 3}, dtype).narrow(0, 1 + n % 3, n); }

TEST(Optimizer, EqualsTorchsFormulasInDoubleFor200RandomUnalignedSizes) {
  at::manual_seed(1);
  const auto sizes = at::randint(1, 70000, {200}, at::kLong);
  for (int round = 0; round < 200; ++round) {
    const std::int64_t n = round % 4 == 0 ? 1 + round % 40 : sizes[round].item<std::int64_t>();
    const std::string type = kTypes[round % 5];
    const auto options = variant(round / 5);
    const auto optimizer = make_optimizer(type, false);
    at::Tensor p = unaligned(n, at::kFloat), grad = unaligned(n, at::kFloat);
    p.copy_(at::randn({n}));
    const auto zero = at::zeros({n}, at::kDouble);
    Reference reference{type, options, p.to(at::kDouble), zero + (type == "adagrad" ? options.initial_accumulator : 0), zero};
    at::Tensor settled = at::ones({n}, at::kBool);  // Lion: elements whose sign never hung on rounding
    for (int step = 0; step < 10; ++step) {
      grad.copy_(at::randn({n}) * (1 + step));
      const double scale = step % 2 == 0 ? 1.0 : 0.25;
      const auto g = grad.to(at::kDouble) * scale;
      if (type == "lion") {
        settled.logical_and_((options.beta1 * reference.first + (1 - options.beta1) * (options.maximize ? -g : g)).abs() > 1e-5);
      }
      optimizer->step({{0, 0, p, {}, grad}}, {options}, {scale});
      reference.step(g);
    }
    const double moved = 10 * options.lr * (type == "sgd" ? 200 : 3);
    const auto error = (p.to(at::kDouble) - reference.p).abs().masked_select(settled);
    const double worst = error.numel() == 0 ? 0 : error.max().item<double>();
    // Each step rounds the weights once more and the movement a few times: units of fp32's epsilon of both.
    const double allowed = 10 * 6e-8 * (reference.p.abs().max().item<double>() + 4) + moved * 6e-7;
    EXPECT_LT(worst, allowed) << type << " n " << n << " round " << round;
    if (type == "lion") {
      EXPECT_GT(settled.to(at::kDouble).mean().item<double>(), 0.99);
    }
    EXPECT_EQ(optimizer->step_count(0), 10);
  }
}

TEST(Optimizer, OneStepFromTheSameStateIsWithinTwoUlpOfTorchsFusedAdamW) {
  at::manual_seed(2);
  for (const bool decoupled : {true, false}) {
    const std::int64_t n = 50001;
    const auto p = at::randn({n}), grad = at::randn({n}), m = at::randn({n}) * 0.1, v = at::rand({n}) * 0.1;
    GroupOptions options;
    options.weight_decay = 0.1;
    const auto optimizer = make_optimizer(decoupled ? "adamw" : "adam", decoupled);
    const auto ours = p.clone();
    optimizer->state(0, "exp_avg", p).copy_(m);
    optimizer->state(0, "exp_avg_sq", p).copy_(v);
    optimizer->set_step_count(0, 4);
    optimizer->step({{0, 0, ours, {}, grad}}, {options}, {1});
    const auto theirs = p.clone(), step = at::full({}, 5.0F), their_m = m.clone(), their_v = v.clone();
    const auto fused = [&](auto&& update) {
      update(at::TensorList{theirs}, at::TensorList{grad}, at::TensorList{their_m}, at::TensorList{their_v}, at::TensorList{},
             at::TensorList{step}, options.lr, options.beta1, options.beta2, options.weight_decay, options.eps, false, false);
    };
    if (decoupled) fused([](const auto&... arguments) { at::_fused_adamw_(arguments...); });
    if (!decoupled) fused([](const auto&... arguments) { at::_fused_adam_(arguments...); });
    const auto ulp = (ours.view(at::kInt) - theirs.view(at::kInt)).abs().masked_select(p.abs() > 0.01);
    EXPECT_LE(ulp.max().item<int>(), 2);
  }
}

TEST(Optimizer, SixteenBitParameterIsTheRoundedMasterAndAnEditOfItIsTakenOver) {
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    for (const char* type : kTypes) {
      at::manual_seed(3);
      const std::int64_t n = 1003;
      const auto optimizer = make_optimizer(type), plain = make_optimizer(type);
      const auto master = at::randn({n}), grad = at::randn({n});
      const auto param = master.to(dtype), wide = master.clone();
      param[7].fill_(3.5);  // the user's edits
      param.narrow(0, 990, 13).fill_(-1);
      wide[7].fill_(3.5);
      wide.narrow(0, 990, 13).fill_(-1);
      for (int step = 0; step < 3; ++step) {
        optimizer->step({{0, 0, param, master, grad}}, {variant(2)}, {0.5});
        plain->step({{0, 0, wide, {}, grad}}, {variant(2)}, {0.5});
        EXPECT_TRUE(at::equal(master, wide)) << type;
        EXPECT_TRUE(at::equal(param, master.to(dtype))) << type;
      }
    }
  }
}

TEST(Optimizer, PiecesThreadsAndGradientTypesChangeNoBit) {
  at::manual_seed(4);
  const std::int64_t n = 150'001, cut = 70'003;
  const auto start = at::randn({n}), grad16 = at::randn({n}).to(at::kBFloat16), grad = grad16.to(at::kFloat);
  const int before = at::get_num_threads();
  for (const char* type : kTypes) {
    const auto whole = start.clone(), split = start.clone();
    const auto a = make_optimizer(type), b = make_optimizer(type);
    for (int step = 0; step < 3; ++step) {
      at::set_num_threads(1);
      a->step({{0, 0, whole, {}, grad}}, {variant(2)}, {0.5});
      at::set_num_threads(3);
      b->step({{0, 0, split.narrow(0, 0, cut), {}, grad16.narrow(0, 0, cut)},
               {1, 0, split.narrow(0, cut, n - cut), {}, grad16.narrow(0, cut, n - cut)}},
              {variant(2)}, {0.5});
    }
    EXPECT_TRUE(at::equal(whole, split)) << type;
  }
  at::set_num_threads(before);
}

TEST(Optimizer, ManySmallAndLargeItemsOfSeveralGroupsAreEachUpdatedOnce) {
  at::manual_seed(5);
  std::vector<UpdateItem> items, alone;
  std::vector<GroupOptions> groups{variant(1), variant(2), variant(5)};
  for (int i = 0; i < 400; ++i) {
    const std::int64_t n = i % 50 == 0 ? 90'000 : i % 37;  // some are empty
    const auto p = at::randn({n}), grad = at::randn({n});
    items.push_back({i, i % 3, p, {}, grad});
    alone.push_back({i, i % 3, p.clone(), {}, grad});
  }
  const int before = at::get_num_threads();
  at::set_num_threads(3);
  for (const char* type : kTypes) {
    const auto together = make_optimizer(type), one_by_one = make_optimizer(type);
    together->prepare(items, groups);
    for (int step = 0; step < 2; ++step) {
      together->step(items, groups, {1});
      for (const auto& item : alone) one_by_one->step({item}, groups, {1});
    }
    for (int i = 0; i < 400; ++i) ASSERT_TRUE(at::equal(items[i].param, alone[i].param)) << type << " item " << i;
  }
  at::set_num_threads(before);
}

TEST(Optimizer, StateIsSetAsideByPrepareInBytesThatFollowFromTheSizes) {
  const auto a = at::zeros({100}), b = at::zeros({5});
  const std::vector<UpdateItem> items{{0, 0, a, {}, a.clone()}, {3, 0, b, {}, b.clone()}};
  const auto padded = (112 + 16) * 4;  // each parameter is rounded up to 16 elements
  for (const char* type : kTypes) {
    const auto optimizer = make_optimizer(type);
    optimizer->prepare(items, {variant(2)});
    const std::int64_t wanted = static_cast<std::int64_t>(optimizer->state_names().size()) * padded;
    EXPECT_EQ(optimizer->state_bytes(), wanted) << type;
    optimizer->step(items, {variant(2)}, {1});
    EXPECT_EQ(optimizer->state_bytes(), wanted) << type;
  }
  const auto sgd = make_optimizer("sgd");
  sgd->prepare(items, {variant(1)});  // no momentum, no buffer
  EXPECT_EQ(sgd->state_bytes(), 0);
}

TEST(Optimizer, StateMovedToAnotherOptimizerContinuesBitForBit) {
  for (const char* type : kTypes) {
    at::manual_seed(6);
    const auto p = at::randn({777}), grad = at::randn({777});
    const auto first = make_optimizer(type), second = make_optimizer(type);
    for (int step = 0; step < 3; ++step) first->step({{4, 0, p, {}, grad}}, {variant(5)}, {1});
    const auto copy = p.clone();
    for (const auto& name : first->state_names()) second->state(4, name, copy).copy_(first->state(4, name, p));
    second->set_step_count(4, first->step_count(4));
    first->step({{4, 0, p, {}, grad}}, {variant(5)}, {1});
    second->step({{4, 0, copy, {}, grad}}, {variant(5)}, {1});
    EXPECT_TRUE(at::equal(p, copy)) << type;
  }
}

TEST(Optimizer, ParametersWithoutAnItemKeepTheirStepCount) {
  const auto optimizer = make_optimizer("adamw");
  const auto p = at::zeros({4}), grad = at::ones({4});
  optimizer->step({{0, 0, p, {}, grad}, {1, 0, p.clone(), {}, grad}}, {{}}, {1});
  optimizer->step({{0, 0, p, {}, grad}}, {{}}, {1});
  EXPECT_EQ(optimizer->step_count(0), 2);
  EXPECT_EQ(optimizer->step_count(1), 1);
  EXPECT_EQ(optimizer->step_count(9), 0);
}

TEST(Optimizer, TheOperatorsOfOtherDevicesGiveTheSameWeights) {
  constexpr UpdateKind kKinds[] = {UpdateKind::adam, UpdateKind::adamw, UpdateKind::sgd, UpdateKind::adagrad, UpdateKind::lion};
  for (int k = 0; k < 5; ++k) {
    for (int v = 0; v < 7; ++v) {
      at::manual_seed(7);
      auto options = variant(v);
      options.maximize = false;
      const auto ours = make_optimizer(kTypes[k], false);
      const auto master = at::randn({501}), master2 = master.clone();
      const auto param = master.to(at::kBFloat16), param2 = param.clone();
      param[3].fill_(9);
      param2[3].fill_(9);
      const double initial = k == 3 ? options.initial_accumulator : 0;
      const auto first = at::full({501}, initial), second = at::zeros({501});
      for (int step = 1; step <= 3; ++step) {
        const auto grad = at::randn({501}) + 0.1;
        const UpdateItem item{0, 0, param2, master2, grad};
        ours->step({{0, 0, param, master, grad}}, {options}, {0.5});
        update_with_aten(kKinds[k], {{&item, first, second, step, step == 1 && options.dampening != 0}}, options, 0.5);
      }
      EXPECT_TRUE(at::allclose(master, master2, 1e-5, 1e-6)) << kTypes[k] << " variant " << v;
      EXPECT_TRUE(at::equal(param2, master2.to(at::kBFloat16)));
    }
  }
}

template <class F>
std::string error_of(F f) {
  try {
    f();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "no error";
}

TEST(Optimizer, MistakesAreRefusedBeforeAnythingIsWritten) {
  const auto optimizer = make_optimizer("adamw");
  const auto p = at::zeros({4}), grad = at::ones({4}), half = at::zeros({4}, at::kBFloat16);
  const std::vector<GroupOptions> groups(1);
  const auto step = [&](UpdateItem item) { return error_of([&] { optimizer->step({{0, 0, p, {}, grad}, item}, groups, {1}); }); };
  EXPECT_THAT(step({1, 0, half, {}, grad}), HasSubstr("without masters"));
  EXPECT_THAT(step({1, 0, p, {}, at::ones({5})}), HasSubstr("4 and 5 elements"));
  EXPECT_THAT(step({1, 0, p, {}, {}}), HasSubstr("no gradient"));
  EXPECT_THAT(step({1, 2, p, {}, grad}), HasSubstr("group 2"));
  EXPECT_THAT(step({1, 0, p, {}, grad.to(at::kDouble)}), HasSubstr("Double"));
  EXPECT_THAT(step({1, 0, p, {}, at::ones({8}).slice(0, 0, 8, 2)}), HasSubstr("contiguous"));
  EXPECT_TRUE(at::equal(p, at::zeros({4})));
  EXPECT_EQ(optimizer->step_count(0), 0);
  EXPECT_THAT(error_of([] { make_optimizer("adamm"); }), HasSubstr("adam, adamw, sgd, adagrad, lion"));
}

TEST(ParseOptimizer, DefaultsAndTheMeaningOfAdam) {
  EXPECT_EQ(parse_optimizer("Adam", "{}").type, "adamw");
  EXPECT_EQ(parse_optimizer("Adam", R"({"adam_w_mode": false})").type, "adam");
  EXPECT_EQ(parse_optimizer("AdamW", "{}").type, "adamw");
  EXPECT_EQ(parse_optimizer("AdamW", R"({"fp32_optimizer_states": false})").options.weight_decay, 0);
  EXPECT_EQ(parse_optimizer("Adam", R"({"torch_adam": true})").options.weight_decay, 0.01);
  EXPECT_EQ(parse_optimizer("Adam", R"({"torch_adam": true, "adam_w_mode": false})").options.weight_decay, 0);
  const auto adam =
      parse_optimizer("ADAMW", R"({"lr": 0.5, "betas": [0.7, 0.9], "eps": 1e-3, "weight_decay": 0.2, "bias_correction": false})").options;
  EXPECT_EQ(adam.lr, 0.5);
  EXPECT_EQ(adam.beta1, 0.7);
  EXPECT_EQ(adam.beta2, 0.9);
  EXPECT_EQ(adam.eps, 1e-3);
  EXPECT_EQ(adam.weight_decay, 0.2);
  EXPECT_FALSE(adam.bias_correction);
  const auto adagrad = parse_optimizer("Adagrad", "{}").options;
  EXPECT_EQ(adagrad.lr, 1e-2);
  EXPECT_EQ(adagrad.eps, 1e-10);
  const auto sgd = parse_optimizer("SGD", R"({"momentum": 0.8, "nesterov": true})").options;
  EXPECT_EQ(sgd.momentum, 0.8);
  EXPECT_TRUE(sgd.nesterov);
  EXPECT_TRUE(is_known_optimizer("Lion"));
  EXPECT_FALSE(is_known_optimizer("RMSprop"));
}

TEST(ParseOptimizer, ErrorsNameTheKeyTheValueAndTheWayOut) {
  const auto error = [](const char* type, const char* json) {
    try {
      parse_optimizer(type, json);
    } catch (const ConfigError& e) {
      return std::string(e.what());
    }
    return std::string("no error");
  };
  EXPECT_THAT(error("AdamW", R"({"weight_decai": 0.1})"), HasSubstr("\"weight_decay\""));
  EXPECT_THAT(error("AdamW", R"({"lr": "fast"})"), HasSubstr("\"lr\" is \"fast\""));
  EXPECT_THAT(error("AdamW", R"({"lr": -1})"), HasSubstr("-1"));
  EXPECT_THAT(error("AdamW", R"({"betas": [0.9, 1.0]})"), HasSubstr("[0, 1)"));
  EXPECT_THAT(error("AdamW", R"({"amsgrad": true})"), HasSubstr("only false is built"));
  EXPECT_THAT(error("AdamW", R"({"max_grad_norm": 1.0})"), HasSubstr("gradient_clipping"));
  EXPECT_THAT(error("SGD", R"({"nesterov": true})"), HasSubstr("momentum > 0"));
  EXPECT_THAT(error("Adma", "{}"), HasSubstr("did you mean \"adam"));
  EXPECT_THAT(error("AdamW", "[1"), HasSubstr("not JSON"));
}

}  // namespace
}  // namespace unshard
