// How fast is a pass through all matrices of a model, beside what the memory and the cores can do?
// Usage: matrix_bench [threads] [seconds a measurement]
// Every layer has matrices of its own, so that a pass reads all weights from memory (SmolLM2-135M: 269 MB in bf16).
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "inference/kernels/matrix_internal.h"
#include "inference/weights/half.h"

namespace unshard::inference {
namespace {

using Clock = std::chrono::steady_clock;

/// Seconds of f(): median and least of as many runs as fit in `limit`, after one to warm up.
struct Times {
  double median, least;
};
template <class F>
Times measure(double limit, F f) {
  f();
  std::vector<double> times;
  const auto begin = Clock::now();
  do {
    const auto start = Clock::now();
    f();
    times.push_back(std::chrono::duration<double>(Clock::now() - start).count());
  } while (times.size() < 3 || std::chrono::duration<double>(Clock::now() - begin).count() < limit);
  std::sort(times.begin(), times.end());
  return {times[times.size() / 2], times.front()};
}

/// Bytes a second that all workers read together from memory.
double read_bandwidth(Workers& workers, double limit) {
  const std::int64_t words = std::int64_t{32} << 20;
  std::vector<std::uint64_t> memory(static_cast<std::size_t>(words), 1);
  std::vector<std::uint64_t> sums(static_cast<std::size_t>(8 * workers.count()));
  const Times times = measure(limit, [&] {
    workers.run([&](std::int64_t w) {
      std::uint64_t sum[8] = {};
      const std::int64_t begin = words / workers.count() * w, end = words / workers.count() * (w + 1);
      for (std::int64_t i = begin; i + 8 <= end; i += 8) {
        for (int j = 0; j < 8; ++j) sum[j] += memory[static_cast<std::size_t>(i + j)];
      }
      for (const std::uint64_t s : sum) sums[static_cast<std::size_t>(8 * w)] += s;
    });
  });
  if (sums[0] == 42) std::puts("");  // the sums are used
  return static_cast<double>(words) * 8 / times.least;
}

constexpr std::int64_t kHidden = 576, kQkv = 960, kMiddle = 1536, kLayers = 30, kVocab = 49152;

struct Layer {
  Matrix qkv, out, gated, down;
};
struct Model {
  std::vector<Layer> layers;
  Matrix head;
  std::int64_t bytes = 0;
};

Model make_model(WeightType type, Workers& workers) {
  std::vector<std::uint16_t> values(static_cast<std::size_t>(kVocab * kHidden));
  std::mt19937 random(1);
  for (auto& v : values) v = bf16_of_float((static_cast<float>(random() >> 8) * 0x1p-24F - 0.5F) * 0.1F);
  const auto view = [&](std::int64_t rows, std::int64_t cols) { return WeightView{FileType::bf16, values.data(), rows, cols, "w"}; };
  const auto pack = [&](std::int64_t rows, std::int64_t cols) {
    const WeightView part = view(rows, cols);
    return Matrix::pack({&part, 1}, type, workers);
  };
  Model model;
  for (std::int64_t l = 0; l < kLayers; ++l) {
    model.layers.push_back({pack(kQkv, kHidden), pack(kHidden, kHidden),
                            Matrix::pack_gated(view(kMiddle, kHidden), view(kMiddle, kHidden), type, workers), pack(kHidden, kMiddle)});
    const Layer& layer = model.layers.back();
    model.bytes += layer.qkv.bytes() + layer.out.bytes() + layer.gated.bytes() + layer.down.bytes();
  }
  model.head = pack(kVocab, kHidden);
  model.bytes += model.head.bytes();
  return model;
}

struct Buffers {
  std::vector<float> x, y, logits;
  Activations small, big;
};

void pass(const Model& model, WeightType type, std::int64_t tokens, std::int64_t head_tokens, Buffers& b, Workers& workers) {
  for (const Layer& layer : model.layers) {
    b.small.assign(b.x.data(), tokens, kHidden, kHidden, type, workers);
    multiply(layer.qkv, b.small, b.y.data(), kQkv, {}, workers);
    b.small.assign(b.x.data(), tokens, kHidden, kHidden, type, workers);
    multiply(layer.out, b.small, b.y.data(), kHidden, {}, workers);
    b.small.assign(b.x.data(), tokens, kHidden, kHidden, type, workers);
    multiply_gated(layer.gated, b.small, Gate::silu, b.y.data(), kMiddle, {}, workers);
    b.big.assign(b.y.data(), tokens, kMiddle, kMiddle, type, workers);
    multiply(layer.down, b.big, b.y.data(), kHidden, {}, workers);
  }
  b.small.assign(b.x.data(), head_tokens, kHidden, kHidden, type, workers);
  multiply(model.head, b.small, b.logits.data(), kVocab, {}, workers);
}

void bench_type(WeightType type, double bandwidth, double limit, Workers& workers) {
  const auto start = Clock::now();
  const Model model = make_model(type, workers);
  std::printf("# %s: %.1f MB, packed in %.2f s\n", weight_type_name(type), static_cast<double>(model.bytes) * 1e-6,
              std::chrono::duration<double>(Clock::now() - start).count());
  const double layer_weights = kLayers * (kHidden * kQkv + kHidden * kHidden + 3.0 * kHidden * kMiddle), head_weights = 1.0 * kHidden * kVocab;
  for (const std::int64_t tokens : {1, 2, 4, 8, 16, 32, 64, 512}) {
    const std::int64_t head_tokens = tokens > 64 ? 1 : tokens;  // prefill wants the last token's logits only
    Buffers b;
    b.x.resize(static_cast<std::size_t>(tokens * kHidden));
    std::mt19937 random(2);
    for (float& v : b.x) v = static_cast<float>(random() >> 8) * 0x1p-23F - 1;
    b.y.resize(static_cast<std::size_t>(tokens * kMiddle));
    b.logits.resize(static_cast<std::size_t>(head_tokens * kVocab));
    const Times t = measure(limit, [&] { pass(model, type, tokens, head_tokens, b, workers); });
    const double flops = 2 * (layer_weights * static_cast<double>(tokens) + head_weights * static_cast<double>(head_tokens));
    const double rate = static_cast<double>(model.bytes) / t.median;
    std::printf("%-5s %6ld %10.2f %10.2f %10.1f %8.1f %8.1f %10.1f\n", weight_type_name(type), static_cast<long>(tokens), t.median * 1e3,
                t.least * 1e3, static_cast<double>(tokens) / t.median, rate * 1e-9, 100 * rate / bandwidth, flops / t.median * 1e-9);
  }
}

}  // namespace
}  // namespace unshard::inference

int main(int argc, char** argv) {
  using namespace unshard::inference;
  Workers workers(argc > 1 ? std::atoll(argv[1]) : 0);
  const double limit = argc > 2 ? std::atof(argv[2]) : 1;
  const char* only = argc > 3 ? argv[3] : "";
  const double bandwidth = read_bandwidth(workers, limit);
  std::printf("# %s, %ld workers, reads %.1f GB/s\n", current_kernels().name, static_cast<long>(workers.count()), bandwidth * 1e-9);
  std::printf("# type tokens  median_ms   least_ms      tok/s     GB/s   %%_read    GFLOP/s\n");
  for (const WeightType type : {WeightType::f32, WeightType::f16, WeightType::bf16, WeightType::q8, WeightType::q4, WeightType::w8a8}) {
    if (*only == '\0' || std::string(only) == weight_type_name(type)) bench_type(type, bandwidth, limit, workers);
  }
}
