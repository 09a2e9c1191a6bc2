#pragma once
// For tests only: how long the random ones run.
#include <algorithm>
#include <cstdlib>

namespace unshard::testing {

/// 1 at first; UNSHARD_SOAK=N (as `make soak` sets it) multiplies the length of random tests.
inline int soak() {
  const char* text = std::getenv("UNSHARD_SOAK");
  return text ? std::max(1, std::atoi(text)) : 1;
}

}  // namespace unshard::testing
