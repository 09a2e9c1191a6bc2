#pragma once
// at::parallel_for behind one compiled function: only parallel.cc is built with OpenMP (ATen's template is serial without it).
#include <cstdint>
#include <type_traits>

namespace unshard::kernels {

/// Call f(context, begin, end) on disjoint ranges that cover [0, n), on up to at::get_num_threads() threads, at least `grain` items a call.
/// Serial inside another parallel region. An exception of `f` comes out of this call.
void parallel_ranges(std::int64_t n, std::int64_t grain, void (*f)(void*, std::int64_t, std::int64_t), void* context);

template <class F>
void parallel_ranges(std::int64_t n, std::int64_t grain, F&& f) {
  parallel_ranges(
      n, grain,
      [](void* context, std::int64_t begin, std::int64_t end) { (*static_cast<std::remove_reference_t<F>*>(context))(begin, end); },
      const_cast<void*>(static_cast<const void*>(&f)));
}

/// f(begin, end) over n elements, cut at multiples of `block`, at least `grain` blocks a call.
template <class F>
void parallel_blocks(std::int64_t n, std::int64_t block, std::int64_t grain, F&& f) {
  parallel_ranges((n + block - 1) / block, grain,
                  [&](std::int64_t first, std::int64_t last) { f(first * block, last * block < n ? last * block : n); });
}

}  // namespace unshard::kernels
