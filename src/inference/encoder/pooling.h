#pragma once
// A text's rows to one vector.
#include <cstdint>

#include "inference/encoder/sentence_settings.h"

namespace unshard::inference {

/// out[hidden] of rows[tokens, hidden]; sums in order of tokens. normalise: to length 1 (of zeros: zeros).
void pool(const float* rows, std::int64_t tokens, std::int64_t hidden, Pooling pooling, bool normalise, float* out);

}  // namespace unshard::inference
