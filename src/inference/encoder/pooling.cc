#include "inference/encoder/pooling.h"

#include <algorithm>
#include <cmath>

namespace unshard::inference {

void pool(const float* rows, std::int64_t tokens, std::int64_t hidden, Pooling pooling, bool normalise, float* out) {
  std::copy(rows, rows + hidden, out);
  if (pooling != Pooling::cls) {
    for (std::int64_t t = 1; t < tokens; ++t) {
      const float* row = rows + t * hidden;
      if (pooling == Pooling::mean)
        for (std::int64_t i = 0; i < hidden; ++i) out[i] += row[i];
      else
        for (std::int64_t i = 0; i < hidden; ++i) out[i] = std::max(out[i], row[i]);
    }
  }
  if (pooling == Pooling::mean)
    for (std::int64_t i = 0; i < hidden; ++i) out[i] /= static_cast<float>(tokens);
  if (!normalise) return;
  double squares = 0;
  for (std::int64_t i = 0; i < hidden; ++i) squares += static_cast<double>(out[i]) * out[i];
  const auto length = static_cast<float>(std::max(std::sqrt(squares), 1e-12));
  for (std::int64_t i = 0; i < hidden; ++i) out[i] /= length;
}

}  // namespace unshard::inference
