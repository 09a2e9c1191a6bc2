#pragma once
// What each instruction set supplies for sampling: passes over logits, on one thread. Plain types only (see the note in core/vec.h).
#include <cstdint>

namespace unshard::inference {

/// Logits are looked at in chunks, and a chunk in 16 lanes: lane l holds every 16th element from the l-th. A pass that looks for large
/// elements skips chunks by their lanes' maxima, and these maxima also tell how large the k-th largest element is at least.
inline constexpr std::int64_t kSampleChunk = 1024, kSampleLanes = 16;
inline std::int64_t sample_chunks(std::int64_t n) { return (n + kSampleChunk - 1) / kSampleChunk; }

struct Above {
  double mass;
  std::int64_t count;
};

struct SampleKernels {
  /// Fill maxima[chunks, 16] (-inf where a lane is empty). Where `allowed` isn't null, elements whose bit is clear become -inf first.
  /// \return whether an element was NaN
  bool (*scan)(float* x, std::int64_t n, const std::uint32_t* allowed, float* maxima);
  /// sums[chunk] = sum of exp((x - max) * scale)
  void (*sum_exp)(const float* x, std::int64_t n, float max, float scale, double* sums);
  /// out = exp((x - max) * scale)
  void (*exps)(const float* x, std::int64_t n, float max, float scale, float* out);
  /// Elements in [low, high), in order: ids[] (their indices) and values[], both with room for 16 more than are found.
  /// \param maxima  as scan() fills them, or null. \param low  finite. \return how many
  std::int64_t (*gather)(const float* x, std::int64_t n, const float* maxima, float low, float high, std::int32_t* ids, float* values);
  /// Leave what has a value >= threshold, in order, in place; the arrays have room for 16 more than n. \return how many
  std::int64_t (*compact)(std::int32_t* ids, float* values, float* weights, std::int64_t n, float threshold);
  /// How many values are >= threshold, and the sum of their weights.
  Above (*above)(const float* values, const float* weights, std::int64_t n, float threshold);
};

const SampleKernels& sample_kernels_portable();
const SampleKernels& sample_kernels_avx2();
const SampleKernels& sample_kernels_avx512();

}  // namespace unshard::inference
