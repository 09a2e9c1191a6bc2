// Ranks that an exception leaves in the middle of an order are told, so that none waits for the others.
#include "inference/runner.h"

#include <gtest/gtest.h>

#include <deque>
#include <map>
#include <nlohmann/json.hpp>

#include "inference/kernels/workers.h"
#include "inference/weights/weights_testing.h"

namespace unshard::inference {
namespace {

constexpr std::int64_t kHidden = 32, kInner = 64, kVocab = 32;

/// The other ranks, as far as rank `rank` sees of them.
class ScriptedPeers : public Peers {
 public:
  explicit ScriptedPeers(int rank) : rank_(rank) {}
  int rank() const override { return rank_; }
  int size() const override { return 2; }
  void all_reduce(float*, std::int64_t) override {
    if (sums_left-- == 0) throw std::runtime_error("a sum failed");
  }
  void broadcast(std::vector<std::int32_t>& words) override {
    if (rank_ == 0) return;
    words = orders.front();
    orders.pop_front();
  }
  void fail(const char*) noexcept override { ++failures; }

  int sums_left = 1 << 20, failures = 0;
  std::deque<std::vector<std::int32_t>> orders;

 private:
  int rank_;
};

/// A Llama of one layer whose weights are all 0.
void write_model(const testing::TemporaryFolder& folder) {
  const std::string layer = "model.layers.0.";
  std::map<std::string, std::vector<std::int64_t>> shapes = {{"model.embed_tokens.weight", {kVocab, kHidden}},
                                                             {"model.norm.weight", {kHidden}},
                                                             {layer + "input_layernorm.weight", {kHidden}},
                                                             {layer + "post_attention_layernorm.weight", {kHidden}}};
  for (const char* name : {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"})
    shapes[layer + name + ".weight"] = {kHidden, kHidden};
  for (const char* name : {"mlp.gate_proj", "mlp.up_proj"}) shapes[layer + name + ".weight"] = {kInner, kHidden};
  shapes[layer + "mlp.down_proj.weight"] = {kHidden, kInner};
  shapes[layer + "self_attn.rotary_emb.inv_freq"] = {8};
  shapes[layer + "self_attn.gate.weight"] = {kHidden};  // of no Llama
  nlohmann::json header;
  std::int64_t end = 0;
  for (const auto& [name, shape] : shapes) {
    const auto begin = end;
    end += checked_product(shape, sizeof(float));
    header[name] = {{"dtype", "F32"}, {"shape", shape}, {"data_offsets", {begin, end}}};
  }
  const auto text = header.dump();
  folder.write("model.safetensors",
               testing::bytes_of<std::uint64_t>(text.size()) + text + std::string(static_cast<std::size_t>(end), '\0'));
  const nlohmann::json config = {{"model_type", "llama"},      {"hidden_size", kHidden},   {"intermediate_size", kInner},
                                 {"num_attention_heads", 2},   {"num_key_value_heads", 2}, {"num_hidden_layers", 1},
                                 {"vocab_size", kVocab},       {"rms_norm_eps", 1e-5},     {"max_position_embeddings", 64},
                                 {"tie_word_embeddings", true}};
  folder.write("config.json", config.dump());
}

class RunnerTest : public ::testing::Test {
 protected:
  RunnerTest() { write_model(folder_); }
  Runner runner(std::shared_ptr<ScriptedPeers> peers) {
    EngineOptions options;
    options.dtype = "fp32";
    options.kv_cache_tokens = 64;
    options.step_tokens = 8;
    return {open_model(folder_.path()), options, workers_, std::move(peers)};
  }
  testing::TemporaryFolder folder_;
  Workers workers_{1};
};

TEST_F(RunnerTest, ASumThatFailsInTheMiddleOfAPromptsLogitsTellsTheOthers) {
  const auto peers = std::make_shared<ScriptedPeers>(0);
  auto ranks = runner(peers);
  const std::vector<Token> prompt(20, 3);
  EXPECT_EQ(ranks.logits_alone(prompt).size(), prompt.size() * kVocab);
  EXPECT_EQ(peers->failures, 0);
  peers->sums_left = 3;
  EXPECT_THROW(ranks.logits_alone(prompt), std::runtime_error);
  EXPECT_EQ(peers->failures, 1);
}

TEST_F(RunnerTest, ARankThatCannotFollowTellsTheOthers) {
  const auto peers = std::make_shared<ScriptedPeers>(1);
  auto follower = runner(peers);
  peers->orders = {{0, 0, 0, 0}};  // the end
  follower.follow();
  EXPECT_EQ(peers->failures, 0);
  peers->orders = {{2, 0, 1, 5}};  // a step that breaks off
  EXPECT_THROW(follower.follow(), std::exception);
  EXPECT_EQ(peers->failures, 1);
}

TEST_F(RunnerTest, TensorsOfALayerThatNobodyReadsAreNamed) {
  EXPECT_EQ(runner(nullptr).info().unread, std::vector<std::string>{"model.layers.0.self_attn.gate.weight"});
}

}  // namespace
}  // namespace unshard::inference
