#include "unshard/inference/torch_models.h"

#include <gtest/gtest.h>

namespace unshard::inference {
namespace {

TEST(TorchModels, AnEngineTakesThemAsTheHeaderSays) {
  EXPECT_THROW(Engine("/no/such/model", {.device = "aten:cpu"}, torch_models()), ModelError);
}

}  // namespace
}  // namespace unshard::inference
