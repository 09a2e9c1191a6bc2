// Bytes held and bytes moved, against ZeRO's arithmetic.
#include "engine_testing.h"

namespace unshard::testing {
namespace {

constexpr int kRanks = 2;

struct Held {
  std::int64_t parameters = 0, gradients = 0, optimizer = 0, total = 0, formula = 0;
};

// What all ranks hold together, and that each is within padding of the formula.
Held held_by_all(int stage, const std::string& extra, bool share_memory) {
  Held sum;
  std::mutex mutex;
  CommOptions options;
  options.share_memory = share_memory;
  run_ranks(kRanks, options, [&](int rank, Communicator& comm) {
    RunOptions run;
    run.stage = stage;
    run.extra = extra;
    run.zero_extra = R"(, "reduce_bucket_size": 1000)";
    TinyModel model;
    auto config = config_of(run, kRanks);
    config.zero.param_persistence_threshold = 0;
    Engine engine(model.named(), config, share(comm), small_buckets());
    for (int step = 0; step < 2; ++step) {
      engine.backward(language_loss(model, rank, step));
      engine.step();
    }
    const auto memory = engine.memory();
    const auto total = memory.parameters + memory.gradients + memory.optimizer;
    // A padded element of everything per parameter, and the optimizer's alignment of both its states to 64 bytes.
    const std::int64_t worst = static_cast<std::int64_t>(model.order.size()) * (16 + 2 * 64);
    EXPECT_LE(std::abs(total - memory.formula), worst) << "rank " << rank << ", stage " << stage;
    EXPECT_EQ(memory.gathered, 0);
    engine.destroy();
    const std::lock_guard lock(mutex);
    sum.parameters += memory.parameters;
    sum.gradients += memory.gradients;
    sum.optimizer += memory.optimizer;
    sum.formula = memory.formula;
  });
  return sum;
}

TEST(Accounts, ModelStatesFollowZerosFormula) {
  const std::int64_t psi = TinyModel().numel();
  const auto count = static_cast<std::int64_t>(TinyModel().order.size());
  struct Mode {
    const char* extra;
    std::int64_t parameter_bytes, optimizer_bytes;
  };
  for (const auto& mode : {Mode{"", 4, 8}, Mode{R"(, "bf16": {"enabled": true})", 2, 12}}) {
    for (int stage = 0; stage <= 3; ++stage) {
      for (const bool share_memory : {true, false}) {
        SCOPED_TRACE(cat("stage ", stage, mode.extra, ", shared ", share_memory));
        const auto held = held_by_all(stage, mode.extra, share_memory);
        const auto expect = [&](std::int64_t got, std::int64_t bytes, bool divided, std::int64_t alignment = 0) {
          const auto want = psi * bytes * (divided ? 1 : kRanks);
          EXPECT_GE(got, want);
          EXPECT_LE(got, want + kRanks * count * (bytes + alignment));
        };
        expect(held.parameters, mode.parameter_bytes, stage >= 3);
        expect(held.gradients, 4, stage >= 1);
        expect(held.optimizer, mode.optimizer_bytes, stage >= 1, 2 * 64);
      }
    }
  }
}

// Bytes this rank sent in one step of `micro_batches`, all operations together.
std::int64_t moved_bytes(int stage, bool share_memory, std::string* names = nullptr) {
  std::int64_t most = 0;
  std::mutex mutex;
  CommOptions options;
  options.share_memory = share_memory;
  run_ranks(kRanks, options, [&](int rank, Communicator& comm) {
    RunOptions run;
    run.stage = stage;
    run.zero_extra = R"(, "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0)";
    const int layers = 6;
    NamedParameters parameters;
    for (int i = 0; i < layers; ++i) parameters.emplace_back(cat("w", i), filled({64, 64}, i, 0.1).set_requires_grad(true));
    auto config = config_of(run, kRanks);
    config.zero.param_persistence_threshold = 0;
    auto tuning = small_buckets();
    tuning.gradients.bucket_numel = 64 * 64;
    Engine engine(parameters, config, share(comm), tuning);
    const auto one_step = [&](int step) {
      auto x = filled({8, 64}, rank + step);
      for (const auto& [name, weight] : parameters) x = at::tanh(at::linear(x, weight));
      engine.backward(x.pow(2).mean());
      engine.step();
    };
    one_step(0);
    comm.barrier("reset");
    comm.reset_counts();
    one_step(1);
    std::int64_t bytes = 0;
    std::string text;
    for (const auto& [name, count] : comm.counts()) {
      bytes += count.bytes;
      text += cat(name, " ", count.calls, " calls ", count.bytes, " bytes; ");
    }
    engine.destroy();
    const std::lock_guard lock(mutex);
    most = std::max(most, bytes);
    if (names) *names = text;
  });
  return most;
}

TEST(Accounts, BytesMovedAStepFollowTheFormulas) {
  const std::int64_t psi_bytes = 6 * 64 * 64 * 4, share = psi_bytes * (kRanks - 1) / kRanks, small = 4096;  // flags and norms
  std::string names;
  for (const bool share_memory : {true, false}) {
    for (int stage = 0; stage <= 2; ++stage) {
      const auto moved = moved_bytes(stage, share_memory, &names);
      EXPECT_GE(moved, 2 * share) << "stage " << stage << ": " << names;
      EXPECT_LE(moved, 2 * share + small) << "stage " << stage << ": " << names;
    }
  }
  const auto shared = moved_bytes(3, true, &names);
  EXPECT_GE(shared, share) << names;
  EXPECT_LE(shared, share + small) << "parameters move nowhere in shared memory: " << names;
  const auto unshared = moved_bytes(3, false, &names);
  EXPECT_GT(unshared, share) << names;
  EXPECT_LE(unshared, 3 * share + 2 * small) << names;
}

TEST(Accounts, TimesOfTheLastStepAreKnown) {
  RunOptions run;
  run.stage = 2;
  train(run, tiny, language_loss, [](Engine& engine, TinyModel&, int) {
    const auto times = engine.times();
    EXPECT_GT(times.forward_ms, 0);
    EXPECT_GT(times.backward_ms, 0);
    EXPECT_GT(times.step_ms, 0);
    EXPECT_GE(times.step_ms, times.update_ms);
  });
}

TEST(Accounts, OffloadedStatesLeaveTheAccountsAndComeBack) {
  run_ranks(2, [](int rank, Communicator& comm) {
    RunOptions run;
    run.stage = 3;
    run.extra = R"(, "bf16": {"enabled": true})";
    TinyModel model;
    Engine engine(model.named(), config_of(run, 2), share(comm), small_buckets());
    engine.backward(language_loss(model, rank, 0));
    EXPECT_THROW(engine.offload_states(), std::invalid_argument);
    engine.step();
    const auto before = engine.memory();
    engine.offload_states({"optim_states", "hp_params"});
    EXPECT_EQ(engine.memory().optimizer, 0);
    EXPECT_EQ(engine.memory().gradients, before.gradients);
    engine.reload_states();
    EXPECT_EQ(engine.memory().optimizer, before.optimizer);
    EXPECT_THROW(engine.offload_states({"optimizer"}), std::invalid_argument);
    engine.backward(language_loss(model, rank, 1));
    engine.step();
    EXPECT_TRUE(engine.was_step_applied());
    EXPECT_NE(engine.dtype_table().find("gradient accumulation   fp32"), std::string::npos) << engine.dtype_table();
    engine.destroy();
  });
}

}  // namespace
}  // namespace unshard::testing
