// Saving and loading the whole training state.
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "engine_testing.h"
#include "tensor_file.h"

namespace unshard::testing {
namespace {

namespace fs = std::filesystem;

class Folder {
 public:
  Folder() : path_(fs::temp_directory_path() / cat("unshard_save_load_", ::getpid())) { fs::create_directories(path_); }
  ~Folder() { fs::remove_all(path_); }
  std::string operator/(const std::string& name) const { return (path_ / name).string(); }

 private:
  fs::path path_;
};

RunOptions run_with(int stage, bool fp16) {
  RunOptions run;
  run.stage = stage;
  run.extra = R"(, "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0.001, "warmup_max_lr": 0.02, "warmup_num_steps": 5}})";
  if (fp16) run.extra += R"(, "fp16": {"enabled": true, "initial_scale_power": 6, "loss_scale_window": 2})";
  return run;
}

void steps(Engine& engine, TinyModel& model, int rank, int from, int to) {
  for (int step = from; step < to; ++step) {
    engine.backward(language_loss(model, rank, step));
    engine.step();
  }
}

TEST(SaveLoad, AResumedRunEqualsAnUninterruptedOneBitForBitAtAnyStage) {
  Folder folder;
  for (const bool fp16 : {false, true}) {
    for (const auto& [from, to] : {std::pair(0, 0), std::pair(1, 2), std::pair(3, 3), std::pair(0, 3), std::pair(3, 0), std::pair(2, 1)}) {
      SCOPED_TRACE(cat("stage ", from, " -> ", to, ", fp16 ", fp16));
      run_ranks(2, [&, from = from, to = to](int rank, Communicator& comm) {
        TinyModel model, resumed;
        Engine engine(model.named(), config_of(run_with(from, fp16), 2), share(comm), small_buckets());
        steps(engine, model, rank, 0, 3);
        engine.save(folder / "state", R"({"note": "mine"})");
        steps(engine, model, rank, 3, 6);
        const auto want = weights_of(engine, model);
        const double scale = engine.loss_scale(), rate = engine.groups()[0].lr;
        engine.destroy();
        Engine again(resumed.named(), config_of(run_with(to, fp16), 2), share(comm), small_buckets());
        EXPECT_EQ(again.load(folder / "state"), R"({"note": "mine"})");
        EXPECT_EQ(again.global_steps(), 3);
        steps(again, resumed, rank, 3, 6);
        expect_same_bits(weights_of(again, resumed), want);
        EXPECT_EQ(again.loss_scale(), scale);
        EXPECT_EQ(again.groups()[0].lr, rate);
        EXPECT_EQ(again.optimizer()->step_count(0), 6);
        again.destroy();
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
    NamedParameters other{{"embed.weight", filled({3, 3}, 1).set_requires_grad(true)}};
    Engine wrong(other, config_of(run, 2), share(comm));
    const auto before = wrong.full_fp32_param(0);
    EXPECT_THROW(wrong.load(folder / "state"), CheckpointError);
    EXPECT_THROW(wrong.load(folder / "nowhere"), CheckpointError);
    EXPECT_TRUE(at::equal(wrong.full_fp32_param(0), before));
    wrong.destroy();
  });
}

TEST(SaveLoad, ADamagedFileOnOneRankIsAnErrorOnAll) {
  Folder folder;
  run_ranks(2, [&](int rank, Communicator& comm) {
    RunOptions run;
    run.stage = 3;
    TinyModel model;
    Engine engine(model.named(), config_of(run, 2), share(comm), small_buckets());
    engine.save(folder / "state");
    comm.barrier("saved");
    if (rank == 1) fs::resize_file(folder / "state/rank_1.safetensors", fs::file_size(folder / "state/rank_1.safetensors") - 8);
    comm.barrier("damaged");
    try {
      engine.load(folder / "state");
      ADD_FAILURE() << "a damaged file was loaded";
    } catch (const CheckpointError& error) {
      EXPECT_NE(std::string(error.what()).find("rank_1.safetensors"), std::string::npos) << error.what();
    }
    steps(engine, model, rank, 0, 1);
    EXPECT_TRUE(engine.was_step_applied());
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
    engine.save(folder / "state");
    EXPECT_FALSE(fs::exists(folder / "state.former"));
    engine.backward(language_loss(model, rank, 0));
    engine.set_gradient_accumulation_boundary(false);
    engine.step();
    EXPECT_THROW(engine.save(folder / "state"), std::invalid_argument);
    engine.destroy();
  });
}

TEST(TensorFile, ReadsWhatItWrote) {
  Folder folder;
  const NamedTensors tensors{
      {"a", filled({3, 4}, 1)}, {"half", filled({5}, 2).to(at::kHalf)}, {"none", at::empty({0})}, {"scalar", at::ones({}, at::kLong)}};
  write_tensor_file(folder / "t", tensors, {{"key", "value"}});
  const TensorFile file(folder / "t");
  EXPECT_EQ(file.metadata().at("key"), "value");
  EXPECT_EQ(file.entries().size(), 4u);
  for (const auto& [name, tensor] : tensors) {
    const auto read = file.read(name);
    EXPECT_EQ(read.scalar_type(), tensor.scalar_type());
    EXPECT_TRUE(at::equal(read, tensor)) << name;
  }
  EXPECT_THROW(file.read("b"), CheckpointError);
}

TEST(TensorFile, EveryPrefixOfAFileIsRefused) {
  Folder folder;
  write_tensor_file(folder / "t", {{"a", filled({6}, 1)}}, {});
  const auto size = fs::file_size(folder / "t");
  for (std::uintmax_t cut = 0; cut < size; ++cut) {
    fs::copy_file(folder / "t", folder / "cut", fs::copy_options::overwrite_existing);
    fs::resize_file(folder / "cut", cut);
    EXPECT_THROW(TensorFile{folder / "cut"}, CheckpointError) << cut;
  }
}

}  // namespace
}  // namespace unshard::testing
