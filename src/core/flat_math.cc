#include "unshard/core/flat_math.h"

#include <cmath>
#include <cstring>
#include <vector>

#include "core/cpu_isa.h"
#include "core/flat_math_kernels.h"
#include "core/parallel.h"
#include "unshard/core/error.h"

namespace unshard::kernels {
namespace {

/// Below this much work (blocks) a second thread costs more than it saves.
constexpr std::int64_t kGrainBlocks = 8;

const FlatKernels& table() { return select_table(flat_kernels_portable, flat_kernels_avx2, flat_kernels_avx512); }

Flat flat(const char* where, const Array& array) {
  switch (array.dtype) {
    case c10::ScalarType::Float:
      return {array.data, Element::f32};
    case c10::ScalarType::BFloat16:
      return {array.data, Element::bf16};
    case c10::ScalarType::Half:
      return {array.data, Element::f16};
    default:
      break;
  }
  throw std::invalid_argument(cat("[core.", where, "] dtype ", c10::toString(array.dtype), "; fp32, bf16 and fp16 are supported"));
}

std::int64_t blocks_of(std::int64_t n) { return (n + kBlock - 1) / kBlock; }

}  // namespace

void accumulate(std::int64_t n, Array accumulator, const Array* inputs, int count, bool first) {
  const Flat target = flat("accumulate", accumulator);
  std::vector<Flat> sources;
  sources.reserve(static_cast<std::size_t>(count));
  bool uniform = true;
  for (int r = 0; r < count; ++r) {
    sources.push_back(flat("accumulate", inputs[r]));
    uniform = uniform && sources.back().element == sources.front().element;
  }
  const FlatKernels& kernels = table();
  parallel_blocks(n, kBlock, kGrainBlocks, [&](std::int64_t begin, std::int64_t end) {
    kernels.accumulate(begin, end, target, sources.data(), count, uniform, first);
  });
}

Squares sum_of_squares(std::int64_t n, Array values) {
  const Flat source = flat("sum_of_squares", values);
  const FlatKernels& kernels = table();
  std::vector<double> sums(static_cast<std::size_t>(blocks_of(n)));
  parallel_ranges(blocks_of(n), kGrainBlocks, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t block = first; block < last; ++block) {
      const std::int64_t begin = block * kBlock, end = begin + kBlock < n ? begin + kBlock : n;
      sums[static_cast<std::size_t>(block)] = kernels.block_squares(begin, end, source);
    }
  });
  Squares result;
  for (const double sum : sums) result.sum += sum;
  // Squares of finite values can't overflow a double (2^256 each): the sum is finite exactly when every element is.
  result.finite = std::isfinite(result.sum);
  return result;
}

void copy(std::int64_t n, Array destination, Array source, double scale) {
  const Flat target = flat("copy", destination), from = flat("copy", source);
  if (target.element == from.element && scale == 1) {
    const std::int64_t width = target.element == Element::f32 ? 4 : 2;
    parallel_blocks(n, kBlock, kGrainBlocks, [&](std::int64_t begin, std::int64_t end) {
      std::memmove(static_cast<char*>(target.data) + begin * width, static_cast<const char*>(from.data) + begin * width,
                   static_cast<std::size_t>((end - begin) * width));
    });
    return;
  }
  const FlatKernels& kernels = table();
  parallel_blocks(n, kBlock, kGrainBlocks,
                  [&](std::int64_t begin, std::int64_t end) { kernels.copy(begin, end, target, from, static_cast<float>(scale)); });
}

}  // namespace unshard::kernels
