#include "core/parallel.h"

#include <ATen/Parallel.h>

namespace unshard::kernels {

void parallel_ranges(std::int64_t n, std::int64_t grain, void (*f)(void*, std::int64_t, std::int64_t), void* context) {
  if (n <= 0) return;
  if (n <= grain) return f(context, 0, n);
  at::parallel_for(0, n, grain, [&](std::int64_t begin, std::int64_t end) { f(context, begin, end); });
}

}  // namespace unshard::kernels
