// Which kernels products use on this processor.
#include "core/cpu_isa.h"
#include "inference/kernels/matrix_internal.h"

namespace unshard::inference {
namespace {

thread_local const MatrixKernels* scoped_kernels = nullptr;

#if defined(__x86_64__)
bool has_vnni() { return __builtin_cpu_supports("avx512vnni"); }
bool has_bf16() { return __builtin_cpu_supports("avx512bf16"); }

MatrixKernels best_avx512(const char* name, bool vnni, bool bf16) {
  MatrixKernels kernels = matrix_kernels_avx512();
  kernels.name = name;
  if (vnni) use_avx512_vnni(kernels);
  if (bf16) use_avx512_bf16(kernels);
  return kernels;
}
const MatrixKernels& with_vnni() {
  static const MatrixKernels kernels = best_avx512("avx512_vnni", true, false);
  return kernels;
}
const MatrixKernels& with_bf16() {
  static const MatrixKernels kernels = best_avx512("avx512_bf16", false, true);
  return kernels;
}
const MatrixKernels& with_both() {
  static const MatrixKernels kernels = best_avx512("avx512_vnni_bf16", true, true);
  return kernels;
}
#endif

}  // namespace

std::vector<const MatrixKernels*> runnable_kernels() {
  std::vector<const MatrixKernels*> result = {&matrix_kernels_portable()};
#if defined(__x86_64__)
  const kernels::Isa isa = kernels::selected_isa();
  if (isa >= kernels::Isa::avx2) result.push_back(&matrix_kernels_avx2());
  if (isa >= kernels::Isa::avx512) {
    result.push_back(&matrix_kernels_avx512());
    if (has_vnni()) result.push_back(&with_vnni());
    if (has_bf16()) result.push_back(&with_bf16());
    if (has_vnni() && has_bf16()) result.push_back(&with_both());
  }
#endif
  return result;
}

const MatrixKernels& current_kernels() {
  static const MatrixKernels& best = *runnable_kernels().back();
  return scoped_kernels != nullptr ? *scoped_kernels : best;
}

ScopedKernels::ScopedKernels(const MatrixKernels& kernels) : before_(scoped_kernels) { scoped_kernels = &kernels; }
ScopedKernels::~ScopedKernels() { scoped_kernels = before_; }

}  // namespace unshard::inference
