#pragma once
// What computing a token costs, by where it stands.
#include <cstdint>

#include "inference/model/model_config.h"

namespace unshard::inference {

/// How many tokens a token looks back on when attention takes as long as all matrices do; 0: looking back costs little (every layer
/// has a window). By counting multiplications, those of attention taken as 2.5 as long as those of matrices: SmolLM2 (30 layers of 576) has
/// 1229 by this, and 1060 to 1640 as measured with AVX-512 for W8A8, Q4_1, INT8 and bf16.
std::int64_t look_back_tokens(const ModelConfig& config);

}  // namespace unshard::inference
