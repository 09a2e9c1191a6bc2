// Saving and loading the whole training state: exactly, at any world size, and never half.
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "checkpoint/testing.h"
#include "engine_testing.h"
#include "unshard/checkpoint/source.h"

namespace unshard::testing {
namespace {

namespace fs = std::filesystem;
using checkpoint::testing::contents_of;
using checkpoint::testing::error_of;
using checkpoint::testing::Folder;

RunOptions run_with(int stage, const std::string& precision) {
  RunOptions run;
  run.stage = stage;
  run.extra = R"(, "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0.001, "warmup_max_lr": 0.02, "warmup_num_steps": 5}})";
  if (precision == "fp16") run.extra += R"(, "fp16": {"enabled": true, "initial_scale_power": 6, "loss_scale_window": 2})";
  if (precision == "bf16") run.extra += R"(, "bf16": {"enabled": true})";
  return run;
}

std::vector<double> steps(Engine& engine, TinyModel& model, int rank, int from, int to) {
  std::vector<double> losses;
  for (int step = from; step < to; ++step) {
    const auto loss = language_loss(model, rank, step);
    losses.push_back(loss.item<double>());
    engine.backward(loss);
    engine.step();
  }
  return losses;
}

/// Masters (or weights), moments and step counts, whole, by name.
Weights state_of(Engine& engine, const TinyModel& model) {
  Weights all;
  for (const auto& name : model.order) {
    const int id = engine.store().find(model.p.at(name));
    all[name] = engine.full_fp32_param(id).clone();
    for (const auto& state : engine.optimizer()->state_names()) all[cat(name, "/", state)] = engine.full_state(id, state).clone();
    all[name + "/step"] = engine.full_state(id, "step");
  }
  return all;
}

TEST(SaveLoad, AResumedRunEqualsAnUninterruptedOneBitForBitAtAnyStage) {
  Folder folder;
  for (const char* precision : {"fp32", "fp16", "bf16"}) {
    for (const auto& [from, to] : {std::pair(0, 0), std::pair(1, 2), std::pair(3, 3), std::pair(0, 3), std::pair(3, 0), std::pair(2, 1)}) {
      SCOPED_TRACE(cat("stage ", from, " -> ", to, ", ", precision));
      run_ranks(2, [&, from = from, to = to](int rank, Communicator& comm) {
        TinyModel model, resumed;
        Engine engine(model.named(), config_of(run_with(from, precision), 2), share(comm), small_buckets());
        steps(engine, model, rank, 0, 3);
        engine.save(folder / "state", {.state_json = R"({"note": "mine"})"});
        steps(engine, model, rank, 3, 6);
        const auto want = state_of(engine, model);
        const double scale = engine.loss_scale(), rate = engine.groups()[0].lr;
        engine.destroy();
        Engine again(resumed.named(), config_of(run_with(to, precision), 2), share(comm), small_buckets());
        const auto report = again.load(folder / "state");
        EXPECT_EQ(report.state_json, R"({"note": "mine"})");
        EXPECT_TRUE(report.has_optimizer);
        EXPECT_EQ(again.global_steps(), 3);
        steps(again, resumed, rank, 3, 6);
        expect_same_bits(state_of(again, resumed), want);
        EXPECT_EQ(again.loss_scale(), scale);
        EXPECT_EQ(again.groups()[0].lr, rate);
        again.destroy();
      });
    }
  }
}

// All ranks train on the same tokens, so that the mean gradient is the same at any world size but for rounding.
TEST(SaveLoad, LoadsAtAnyWorldSizeStageAndDtypeAndGoesOnAlike) {
  Folder folder;
  for (const char* precision : {"fp32", "bf16"}) {
    for (int from = 0; from < 4; ++from) {
      Weights saved;
      std::vector<double> want;
      run_ranks(2, [&](int rank, Communicator& comm) {
        TinyModel model;
        Engine engine(model.named(), config_of(run_with(from, precision), 2), share(comm), small_buckets());
        steps(engine, model, 0, 0, 3);
        engine.save(folder / "state");
        const auto state = state_of(engine, model);
        const auto losses = steps(engine, model, 0, 3, 6);
        if (rank == 0) saved = state, want = losses;
        engine.destroy();
      });
      for (const int world : {1, 3, 4}) {
        const int to = (from + world) % 4;
        for (const char* other : {"fp32", "bf16"}) {
          if (std::string(other) != precision && world != 3) continue;
          SCOPED_TRACE(cat(precision, " stage ", from, " at 2 ranks -> ", other, " stage ", to, " at ", world));
          run_ranks(world, [&](int rank, Communicator& comm) {
            TinyModel model;
            Engine engine(model.named(), config_of(run_with(to, other), world), share(comm), small_buckets());
            engine.load(folder / "state");
            expect_same_bits(state_of(engine, model), saved);
            const auto losses = steps(engine, model, 0, 3, 6);
            if (std::string(other) == precision) {
              for (std::size_t i = 0; i < losses.size(); ++i) EXPECT_NEAR(losses[i], want[i], 1e-5) << "step " << 3 + i;
            }
            engine.destroy();
          });
        }
      }
    }
  }
}

// Parameters whose elements lie in another order are saved in row-major order, and load into any order.
TEST(SaveLoad, AParameterOfAnotherLayoutIsSavedInRowMajorOrder) {
  Folder folder;
  const auto turned = [](bool turn) {
    TinyModel model;
    if (turn) {
      const at::NoGradGuard no_grad;
      model.p["up.weight"] = model.p["up.weight"].detach().t().contiguous().t().set_requires_grad(true);
    }
    return model;
  };
  for (const int stage : {0, 2, 3}) {
    for (const bool from : {true, false}) {
      Weights saved;
      run_ranks(2, [&](int rank, Communicator& comm) {
        auto model = turned(from);
        Engine engine(model.named(), config_of(run_with(stage, "bf16"), 2), share(comm), small_buckets());
        steps(engine, model, 0, 0, 2);
        engine.save(folder / "state");
        const auto state = state_of(engine, model);
        if (rank == 0) saved = state;
        engine.destroy();
      });
      const auto source = checkpoint::open(folder / "state");
      EXPECT_TRUE(at::equal(source->read({"fp32", "up.weight", 0, kWide * kHidden}), saved.at("up.weight").contiguous().view(-1)));
      run_ranks(3, [&](int rank, Communicator& comm) {
        auto model = turned(!from);
        Engine engine(model.named(), config_of(run_with(stage, "bf16"), 3), share(comm), small_buckets());
        engine.load(folder / "state");
        expect_same_bits(state_of(engine, model), saved);
        engine.destroy();
      });
    }
  }
}

TEST(SaveLoad, AMismatchIsFoundBeforeAnythingChanges) {
  Folder folder;
  run_ranks(2, [&](int rank, Communicator& comm) {
    RunOptions run;
    run.stage = 2;
    TinyModel model;
    Engine engine(model.named(), config_of(run, 2), share(comm), small_buckets());
    steps(engine, model, rank, 0, 1);
    engine.save(folder / "state");
    engine.destroy();
    const auto refused = [&](const NamedParameters& parameters, const RunOptions& options, const std::string& part) {
      Engine wrong(parameters, config_of(options, 2), share(comm));
      const auto before = wrong.full_fp32_param(0);
      const auto error = error_of([&] { wrong.load(folder / "state"); });
      EXPECT_NE(error.find(part), std::string::npos) << error;
      EXPECT_TRUE(at::equal(wrong.full_fp32_param(0), before));
      wrong.destroy();
    };
    const auto trained = [](at::IntArrayRef sizes) { return filled(sizes, 1).set_requires_grad(true); };
    refused({{"embed.weight", trained({3, 3})}}, run, "'embed.weight' has shape [13, 7], the model's is [3, 3]");
    refused({{"other", trained({3})}}, run, "has no 'other'");
    refused({{"scale", trained({})}}, run, "'embed.weight', 'norm.weight'");
    auto sgd = run;
    sgd.sgd = true;
    refused(TinyModel().named(), sgd, "load without the optimizer");
    Engine elsewhere(TinyModel().named(), config_of(run, 2), share(comm));
    EXPECT_NE(error_of([&] { elsewhere.load(folder / "nowhere"); }).find("not a checkpoint"), std::string::npos);
    elsewhere.destroy();
  });
}

TEST(SaveLoad, APartialLoadTakesWhatIsThereAndSaysWhatIsnt) {
  Folder folder;
  run_ranks(2, [&](int rank, Communicator& comm) {
    RunOptions run;
    run.stage = 3;
    TinyModel model;
    Engine engine(model.named(), config_of(run, 2), share(comm), small_buckets());
    steps(engine, model, rank, 0, 2);
    engine.save(folder / "state");
    const auto want = weights_of(engine, model);
    engine.destroy();

    auto sgd = run;
    sgd.sgd = true;
    TinyModel weights_only;
    Engine other(weights_only.named(), config_of(sgd, 2), share(comm), small_buckets());
    const auto report = other.load(folder / "state", {.load_optimizer = true, .weights_only = true});
    EXPECT_FALSE(report.has_optimizer);
    EXPECT_EQ(other.global_steps(), 0);
    expect_same_bits(weights_of(other, weights_only), want);
    other.load(folder / "state", {.load_optimizer = false});
    EXPECT_EQ(other.global_steps(), 2);
    other.destroy();

    NamedParameters some{{"norm.bias", filled({kHidden}, 9).set_requires_grad(true)}, {"new", filled({5}, 1).set_requires_grad(true)}};
    Engine part(some, config_of(run, 2), share(comm));
    const auto lists = part.load(folder / "state", {.strict = false});
    EXPECT_EQ(lists.missing, std::vector<std::string>{"new"});
    EXPECT_EQ(lists.unexpected.size(), model.order.size() - 1);
    EXPECT_TRUE(at::equal(part.full_fp32_param(0), want.at("norm.bias")));
    EXPECT_TRUE(at::equal(part.full_fp32_param(1), filled({5}, 1)));
    EXPECT_EQ(part.optimizer()->step_count(0), 2);
    EXPECT_EQ(part.optimizer()->step_count(1), 0);
    part.destroy();
  });
}

// An engine that has trained and one that hasn't are the same after a load.
TEST(SaveLoad, AnEarlyStateReplacesALaterOne) {
  Folder folder;
  run_ranks(2, [&](int rank, Communicator& comm) {
    RunOptions run;
    run.stage = 1;
    TinyModel model;
    Engine engine(model.named(), config_of(run, 2), share(comm), small_buckets());
    engine.save(folder / "start");
    const auto first = steps(engine, model, rank, 0, 3);
    engine.load(folder / "start");
    EXPECT_EQ(steps(engine, model, rank, 0, 3), first);
    engine.backward(language_loss(model, rank, 3));  // a gradient that the load drops
    engine.load(folder / "start");
    EXPECT_EQ(steps(engine, model, rank, 0, 3), first);
    engine.destroy();
  });
}

TEST(SaveLoad, FrozenParametersCanBeLeftOut) {
  Folder folder;
  run_ranks(2, [&](int rank, Communicator& comm) {
    RunOptions run;
    run.stage = 3;
    const auto frozen = [] {
      TinyModel model;
      for (const char* name : {"embed.weight", "down.weight"}) model.p[name].set_requires_grad(false);
      return model;
    };
    auto model = frozen(), other = frozen();
    Engine engine(model.named(), config_of(run, 2), share(comm), small_buckets());
    steps(engine, model, rank, 0, 2);
    engine.save(folder / "all");
    engine.save(folder / "trained", {.exclude_frozen = true});
    const auto want = weights_of(engine, model);
    engine.destroy();
    EXPECT_LT(fs::file_size(folder / "trained/rank_0.safetensors"), fs::file_size(folder / "all/rank_0.safetensors") + 1);
    const auto all = checkpoint::open(folder / "all"), trained = checkpoint::open(folder / "trained");
    EXPECT_TRUE(all->contents().find("embed.weight")->has("param"));
    EXPECT_TRUE(trained->contents().find("embed.weight")->excluded);
    EXPECT_TRUE(trained->contents().find("embed.weight")->kinds.empty());
    Engine again(other.named(), config_of(run, 2), share(comm), small_buckets());
    EXPECT_TRUE(again.load(folder / "trained").missing.empty());
    expect_same_bits(weights_of(again, other), want);  // frozen ones start alike in both
    again.destroy();
  });
}

TEST(SaveLoad, ADamagedFileIsAnErrorOnAllRanksAndChangesNothing) {
  Folder folder;
  run_ranks(2, [&](int rank, Communicator& comm) {
    RunOptions run;
    run.stage = 3;
    TinyModel model;
    Engine engine(model.named(), config_of(run, 2), share(comm), small_buckets());
    steps(engine, model, rank, 0, 1);
    engine.save(folder / "state");
    steps(engine, model, rank, 1, 2);
    const auto before = state_of(engine, model);
    const auto path = folder / "state/rank_1.safetensors";
    const auto refused = [&](const std::function<void()>& damage) {
      comm.barrier("whole");
      if (rank == 1) damage();
      comm.barrier("damaged");
      const auto error = error_of([&] { engine.load(folder / "state"); });
      EXPECT_NE(error.find("rank_1.safetensors"), std::string::npos) << error;
      expect_same_bits(state_of(engine, model), before);
      EXPECT_EQ(engine.global_steps(), 2);
    };
    refused([&] {  // one bit in the middle of the values
      std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
      file.seekg(4096 + 20);
      const int byte = file.get();
      file.seekp(4096 + 20);
      file.put(static_cast<char>(byte ^ 4));
    });
    refused([&] { fs::resize_file(path, fs::file_size(path) - 8); });
    refused([&] { fs::remove(path); });
    steps(engine, model, rank, 2, 3);
    EXPECT_TRUE(engine.was_step_applied());
    engine.destroy();
  });
}

TEST(SaveLoad, ADamagedByteAnywhereChangesNothing) {
  Folder folder;
  run_ranks(2, [&](int rank, Communicator& comm) {
    TinyModel model;
    Engine engine(model.named(), config_of(run_with(3, "bf16"), 2), share(comm), small_buckets());
    steps(engine, model, rank, 0, 1);
    engine.save(folder / "state", {.state_json = R"({"note": "mine"})"});
    steps(engine, model, rank, 1, 2);
    const auto before = state_of(engine, model);
    for (const char* name : {"rank_0.safetensors", "rank_1.safetensors", "state.json"}) {
      const auto path = folder / cat("state/", name);
      const bool has_header = fs::path(path).extension() == ".safetensors";
      const auto size = static_cast<std::int64_t>(fs::file_size(path)), first = std::int64_t{has_header ? 4096 : 0};
      for (std::int64_t at = first; at < size; at += std::max<std::int64_t>(1, (size - first) / 20)) {
        const auto flip = [&] {
          comm.barrier("before");
          if (rank == 0) {
            auto bytes = contents_of(path);
            bytes[static_cast<std::size_t>(at)] = static_cast<char>(bytes[static_cast<std::size_t>(at)] ^ 1);
            checkpoint::testing::put(path, bytes);
          }
          comm.barrier("after");
        };
        flip();
        const auto error = error_of([&] { engine.load(folder / "state"); });
        EXPECT_NE(error.find(name), std::string::npos) << "byte " << at << " of " << name << ": " << error;
        expect_same_bits(state_of(engine, model), before);
        flip();
      }
    }
    engine.load(folder / "state");
    EXPECT_EQ(engine.global_steps(), 1);
    engine.destroy();
  });
}

TEST(SaveLoad, AFolderThatCantBeWrittenIsAnErrorOnAllRanksAndTheFormerStays) {
  Folder folder;
  std::ofstream(folder / "file") << "not a folder";
  run_ranks(2, [&](int rank, Communicator& comm) {
    TinyModel model;
    Engine engine(model.named(), config_of({}, 2), share(comm), small_buckets());
    engine.save(folder / "state");
    EXPECT_THROW(engine.save(folder / "file/below"), CheckpointError);
    EXPECT_TRUE(fs::exists(folder / "state/manifest.json"));
    EXPECT_FALSE(fs::exists(folder / "state.partial"));
    engine.save(folder / "state/");
    engine.destroy();
  });
}

TEST(SaveLoad, ASaveWithinAnAccumulationIsTheStateAfterTheLastUpdateAndDisturbsNothing) {
  Folder folder;
  for (const int stage : {0, 2, 3}) {
    run_ranks(2, [&](int rank, Communicator& comm) {
      auto run = run_with(stage, "bf16");
      TinyModel model;
      Engine engine(model.named(), config_of(run, 2), share(comm), small_buckets());
      engine.set_accumulation_steps(3);
      const auto micro = [&](int step) {
        engine.backward(language_loss(model, rank, step));
        engine.step();
      };
      for (int step = 0; step < 4; ++step) micro(step);
      engine.save(folder / "within");
      engine.backward(language_loss(model, rank, 4));
      engine.save(folder / "before_step");
      engine.step();
      micro(5);
      const auto undisturbed = state_of(engine, model);
      for (const auto* name : {"within", "before_step"}) {
        engine.load(folder / name);
        EXPECT_EQ(engine.global_steps(), 1);
        EXPECT_EQ(engine.micro_steps(), 3);
        for (int step = 3; step < 6; ++step) micro(step);
        EXPECT_EQ(engine.global_steps(), 2);
        expect_same_bits(state_of(engine, model), undisturbed);
      }
      engine.destroy();
    });
  }
}

TEST(SaveLoad, ASaveInTheBackgroundHasTheValuesOfItsMoment) {
  Folder folder;
  for (const int stage : {0, 3}) {
    run_ranks(2, [&](int rank, Communicator& comm) {
      auto run = run_with(stage, "bf16");
      run.extra += R"(, "unshard": {"checkpoint": {"async": true, "keep": 2}})";
      TinyModel model;
      Engine engine(model.named(), config_of(run, 2), share(comm), small_buckets());
      std::map<int, Weights> at;
      for (int step = 1; step <= 4; ++step) {
        steps(engine, model, rank, step - 1, step);
        at[step] = state_of(engine, model);
        engine.save(folder / cat("step", step), {.write_latest = true});
        EXPECT_TRUE(engine.is_saving());
        steps(engine, model, rank, 10, 11);  // meanwhile
        engine.finish_save();
        EXPECT_FALSE(engine.is_saving());
        EXPECT_EQ(checkpoint::latest_tag(folder.path()), cat("step", step));
        engine.load(folder / cat("step", step));
        expect_same_bits(state_of(engine, model), at[step]);
      }
      comm.barrier("all looked");
      EXPECT_FALSE(fs::exists(folder / "step1"));
      EXPECT_TRUE(fs::exists(folder / "step3"));
      engine.save(folder / "last");
      engine.destroy();  // waits
      checkpoint::verify(folder / "last");
    });
  }
}

TEST(SaveLoad, ASaveThatFailsInTheBackgroundIsAnErrorOfTheNextCallOnAllRanks) {
  Folder folder;
  run_ranks(2, [&](int rank, Communicator& comm) {
    TinyModel model;
    Engine engine(model.named(), config_of({}, 2), share(comm), small_buckets());
    engine.save(folder / "state");
    if (rank == 0) fs::create_directories(folder / "latest/in the way");
    comm.barrier("blocked");
    engine.save(folder / "state", {.background = true, .write_latest = true});
    steps(engine, model, rank, 0, 1);
    const auto error = error_of([&] { engine.save(folder / "state"); });
    EXPECT_NE(error.find("a save in the background failed"), std::string::npos) << error;
    engine.save(folder / "state");
    engine.destroy();
    checkpoint::verify(folder / "state");
  });
}

/// A state that was never a file.
class Formula : public checkpoint::Source {
 public:
  Formula() {
    contents_.origin = "a formula";
    contents_.optimizer_type = "torch.AdamW";
    contents_.optimizer_states = {"exp_avg", "exp_avg_sq"};
    contents_.counters.global_steps = 7;
    for (const auto& name : TinyModel().order) {
      const auto sizes = TinyModel().p.at(name).sizes().vec();
      contents_.parameters.push_back({name, sizes, {}, "fp32", 0, 5, false, {"fp32", "exp_avg", "exp_avg_sq"}});
    }
  }
  const checkpoint::Contents& contents() const override { return contents_; }
  at::Tensor read(const checkpoint::Range& range) override {
    if (fails_at == range.name) throw CheckpointError("the formula of " + range.name + " is lost");
    return whole(range.name, range.kind).view(-1).slice(0, range.begin, range.end);
  }
  static at::Tensor whole(const std::string& name, const std::string& kind) {
    return filled(TinyModel().p.at(name).sizes(), static_cast<int>(name.size() + 50 * kind.size())).abs();
  }
  std::string fails_at;

 private:
  checkpoint::Contents contents_;
};

TEST(SaveLoad, LoadsFromAnySourceAndRefusesToGoOnAfterHalfOfOne) {
  run_ranks(2, [&](int rank, Communicator& comm) {
    TinyModel model;
    Engine engine(model.named(), config_of(run_with(3, "bf16"), 2), share(comm), small_buckets());
    Formula source;
    if (rank == 1) source.fails_at = "up.bias";  // after everything was checked
    EXPECT_NE(error_of([&] { engine.load_from(source); }).find("the formula of up.bias is lost"), std::string::npos);
    EXPECT_THROW(steps(engine, model, rank, 0, 1), std::invalid_argument);
    source.fails_at.clear();
    engine.load_from(source);
    EXPECT_EQ(engine.global_steps(), 7);
    for (const auto& name : model.order) {
      const int id = engine.store().find(model.p.at(name));
      EXPECT_TRUE(at::equal(engine.full_fp32_param(id), Formula::whole(name, "fp32"))) << name;
      EXPECT_TRUE(at::equal(engine.full_state(id, "exp_avg_sq"), Formula::whole(name, "exp_avg_sq"))) << name;
      EXPECT_EQ(engine.optimizer()->step_count(id), 5);
    }
    steps(engine, model, rank, 0, 1);
    engine.destroy();
  });
}

}  // namespace
}  // namespace unshard::testing
