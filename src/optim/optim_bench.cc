// How fast is the update? unshard_optim_bench [MILLIONS of elements = 100] [REPEATS = 9] [THREADS ... = 1 2]
// One flat array, seed fixed, one warm-up call, then median, min and max over the repeats. GB/s counts each array once per read and write.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "unshard/core/flat_math.h"
#include "unshard/optim/kernels.h"

namespace {

using unshard::kernels::Array;

struct Settings {
  std::int64_t n = 100'000'000;
  int repeats = 9;
  std::vector<int> threads{1, 2};
};

/// Times `call` and prints a line; `bytes` is what it must move at least.
void measure(const Settings& settings, int threads, const char* name, double bytes_per_element, bool correct,
             const std::function<void()>& call) {
  call();
  std::vector<double> ms;
  for (int i = 0; i < settings.repeats; ++i) {
    const auto start = std::chrono::steady_clock::now();
    call();
    ms.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
  }
  std::sort(ms.begin(), ms.end());
  const double bytes = bytes_per_element * static_cast<double>(settings.n);
  std::printf("%-44s %7d %9.2f %9.2f %9.2f %8.1f  %s\n", name, threads, ms[ms.size() / 2], ms.front(), ms.back(), bytes / ms.front() / 1e6,
              correct ? "" : "WRONG");
  std::fflush(stdout);
}

float* f32(const at::Tensor& tensor) { return tensor.mutable_data_ptr<float>(); }
Array array(const at::Tensor& tensor) { return {tensor.mutable_data_ptr(), tensor.scalar_type()}; }

unshard::kernels::AdamArgs adam_args(std::int64_t step, double scale) { return {1e-3, 0.9, 0.999, 1e-8, 0.01, true, true, step, scale}; }

/// Our fp32 AdamW against torch's fused one, from the same start: times of both and whether they agree.
void fp32_adamw(const Settings& settings, int threads) {
  const auto grad = at::full({settings.n}, 1e-3F);
  auto p = at::zeros({settings.n}), m = at::zeros({settings.n}), v = at::zeros({settings.n});
  const auto q = at::zeros({settings.n}), m2 = at::zeros({settings.n}), v2 = at::zeros({settings.n}), step2 = at::zeros({});
  std::int64_t step = 0;
  const auto theirs = [&] {
    step2.add_(1);
    at::_fused_adamw_({q}, {grad}, {m2}, {v2}, {}, {step2}, 1e-3, 0.9, 0.999, 0.01, 1e-8, false, false);
  };
  const auto ours = [&] { unshard::kernels::adam(settings.n, f32(p), {}, array(grad), f32(m), f32(v), adam_args(++step, 1)); };
  ours();
  theirs();
  const bool agree = at::allclose(p, q, 1e-5, 1e-9);
  measure(settings, threads, "fp32 AdamW, torch fused", 28, true, theirs);
  measure(settings, threads, "fp32 AdamW", 28, agree, ours);
}

/// The whole update of a bf16 parameter with fp32 masters: norm of the gradients, then one pass that unscales, clips, updates and casts.
void whole_update(const Settings& settings, int threads, at::ScalarType grad_type) {
  const auto grad = at::full({settings.n}, 1e-3F).to(grad_type);
  const auto master = at::zeros({settings.n}), m = at::zeros({settings.n}), v = at::zeros({settings.n});
  const auto param = master.to(at::kBFloat16);
  std::int64_t step = 0;
  const auto update = [&] {
    const auto squares = unshard::kernels::sum_of_squares(settings.n, array(grad));
    const double clip = 1.0 / std::max(1.0, std::sqrt(squares.sum) + 1e-6);
    unshard::kernels::adam(settings.n, f32(master), array(param), array(grad), f32(m), f32(v), adam_args(++step, clip));
  };
  update();
  const bool cast = at::equal(param, master.to(at::kBFloat16)) && master[0].item<float>() != 0;
  const bool wide = grad_type == at::kFloat;
  measure(settings, threads, wide ? "bf16 whole update, fp32 gradients" : "bf16 whole update, bf16 gradients", wide ? 36 : 32, cast,
          update);
}

void passes(const Settings& settings, int threads) {
  const auto a = at::ones({settings.n}), b = at::ones({settings.n}), sum = at::zeros({settings.n});
  const auto half = a.to(at::kBFloat16), half2 = b.to(at::kBFloat16);
  const Array wide[] = {array(a), array(b)}, narrow[] = {array(half), array(half2)};
  measure(settings, threads, "sum_of_squares fp32", 4, true, [&] { unshard::kernels::sum_of_squares(settings.n, wide[0]); });
  measure(settings, threads, "accumulate 2 x fp32 into fp32, first", 12, true,
          [&] { unshard::kernels::accumulate(settings.n, array(sum), wide, 2, true); });
  const bool correct = at::equal(sum, at::full({settings.n}, 2.0F));
  measure(settings, threads, "accumulate 2 x bf16 into fp32", 12, correct,
          [&] { unshard::kernels::accumulate(settings.n, array(sum), narrow, 2, false); });
  measure(settings, threads, "copy fp32 to bf16", 6, true, [&] { unshard::kernels::copy(settings.n, array(half), wide[0]); });
  measure(settings, threads, "copy fp32 to fp32", 8, true, [&] { unshard::kernels::copy(settings.n, array(sum), wide[0]); });
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  if (argc > 1) settings.n = static_cast<std::int64_t>(std::atof(argv[1]) * 1e6);
  if (argc > 2) settings.repeats = std::max(1, std::atoi(argv[2]));
  if (argc > 3) settings.threads.clear();
  for (int i = 3; i < argc; ++i) settings.threads.push_back(std::max(1, std::atoi(argv[i])));
  std::printf("# %lld elements, instruction set %s\n", static_cast<long long>(settings.n), unshard::kernels::isa());
  std::printf("%-44s %7s %9s %9s %9s %8s\n", "# pass", "threads", "median_ms", "min_ms", "max_ms", "GB/s");
  for (const int threads : settings.threads) {
    at::set_num_threads(threads);
    fp32_adamw(settings, threads);
    whole_update(settings, threads, at::kFloat);
    whole_update(settings, threads, at::kBFloat16);
    passes(settings, threads);
  }
  return 0;
}
