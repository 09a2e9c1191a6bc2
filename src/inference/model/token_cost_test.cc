#include "inference/model/token_cost.h"

#include <gtest/gtest.h>

namespace unshard::inference {
namespace {

ModelConfig smollm2() {
  ModelConfig c;
  c.hidden = 576, c.layers = 30, c.heads = 9, c.kv_heads = 3, c.head_size = 64, c.intermediate = 1536;
  return c;
}

TEST(LookBackTokens, AreTheMatricesProductsOverAttentionsForOneToken) {
  // A layer: q and o of 576 x 576, k and v of 576 x 192, gate, up and down of 576 x 1536; over 5 x 576.
  EXPECT_EQ(look_back_tokens(smollm2()), (2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536) / (5 * 576));
}

TEST(LookBackTokens, CountOnlyTheExpertsThatATokenUses) {
  auto c = smollm2();
  c.experts = {.experts = 60, .chosen = 2, .intermediate = 700, .shared_intermediate = 136, .dense_layers = {}};
  EXPECT_EQ(look_back_tokens(c), look_back_tokens(smollm2()));
  c.experts.intermediate = 7000;
  c.experts.dense_layers.assign(30, true);
  EXPECT_EQ(look_back_tokens(c), look_back_tokens(smollm2()));
}

TEST(LookBackTokens, CountNoLayersThatLookBackOnAWindowOnly) {
  auto c = smollm2();
  c.window = 512;
  EXPECT_EQ(look_back_tokens(c), 0);
  c.windowed.assign(30, true);
  for (int i = 0; i < 5; ++i) c.windowed[static_cast<std::size_t>(6 * i)] = false;
  EXPECT_EQ(look_back_tokens(c), (2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536) * 6 / (5 * 576));
}

}  // namespace
}  // namespace unshard::inference
