// How fast is a pass through all matrices of a model, beside what the memory and the cores can do?
// Usage: matrix_bench [threads] [seconds a measurement] [type]. Rates are of the least times.
// Every layer has matrices of its own, so that a pass reads all weights from memory (SmolLM2-135M: 269 MB in bf16).
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "inference/kernels/matrix_internal.h"
#include "inference/weights/half.h"

namespace unshard::inference {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

/// Times of a pass and of each call in it. `least` adds up every call's least time, which holds on a machine that others use too.
class Stopwatch {
 public:
  template <class F>
  void call(F f) {
    const auto start = Clock::now();
    f();
    const double t = seconds_since(start);
    if (next_ == least_.size()) least_.push_back(t);
    least_[next_] = std::min(least_[next_], t);
    ++next_;
  }
  /// pass(*this) for about `limit` seconds, after one to warm up.
  template <class Pass>
  void measure(double limit, Pass pass) {
    const auto begin = Clock::now();
    do {
      const auto start = Clock::now();
      next_ = 0;
      pass(*this);
      passes_.push_back(seconds_since(start));
    } while (passes_.size() < 4 || seconds_since(begin) < limit);
    passes_.erase(passes_.begin());
    std::sort(passes_.begin(), passes_.end());
  }
  double median() const { return passes_[passes_.size() / 2]; }
  double least() const { return std::accumulate(least_.begin(), least_.end(), 0.0); }

 private:
  std::vector<double> passes_, least_;
  std::size_t next_ = 0;
};

/// Bytes a second that all workers read together from memory.
double read_bandwidth(Workers& workers, double limit) {
  const std::int64_t words = std::int64_t{32} << 20, piece = std::int64_t{1} << 19, grain = 8192;
  std::vector<std::uint64_t> memory(static_cast<std::size_t>(words), 1);
  std::atomic<std::uint64_t> total{0};
  Stopwatch watch;
  watch.measure(limit, [&](Stopwatch& w) {
    for (std::int64_t first = 0; first < words; first += piece) {
      w.call([&] {
        workers.parallel_for(piece, grain, [&](std::int64_t begin, std::int64_t end) {
          std::uint64_t sum[8] = {};
          for (std::int64_t i = first + begin; i + 8 <= first + end; i += 8) {
            for (std::int64_t j = 0; j < 8; ++j) sum[j] += memory[static_cast<std::size_t>(i + j)];
          }
          for (const std::uint64_t part : sum) total += part;
        });
      });
    }
  });
  if (total == 42) std::puts("");  // the sum is used
  return static_cast<double>(words) * 8 / watch.least();
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

std::vector<float> random_inputs(std::int64_t count) {
  std::mt19937 random(2);
  std::vector<float> result(static_cast<std::size_t>(count));
  for (float& v : result) v = static_cast<float>(random() >> 8) * 0x1p-23F - 1;
  return result;
}

struct Buffers {
  std::vector<float> x, h, y, logits;
  Activations small, big;
};

/// One product with its inputs' rounding.
template <class Multiply>
void step(Stopwatch& watch, Activations& x, const std::vector<float>& from, std::int64_t tokens, std::int64_t cols, WeightType type,
          Workers& workers, Multiply multiply_with) {
  watch.call([&] {
    x.assign(from.data(), tokens, cols, cols, type, workers);
    multiply_with(x);
  });
}

void pass(const Model& model, WeightType type, std::int64_t tokens, std::int64_t head_tokens, Buffers& b, Workers& workers,
          Stopwatch& watch) {
  for (const Layer& layer : model.layers) {
    step(watch, b.small, b.x, tokens, kHidden, type, workers,
         [&](const Activations& x) { multiply(layer.qkv, x, b.y.data(), kQkv, {}, workers); });
    step(watch, b.small, b.x, tokens, kHidden, type, workers,
         [&](const Activations& x) { multiply(layer.out, x, b.y.data(), kHidden, {}, workers); });
    step(watch, b.small, b.x, tokens, kHidden, type, workers,
         [&](const Activations& x) { multiply_gated(layer.gated, x, Gate::silu, b.y.data(), kMiddle, {}, workers); });
    step(watch, b.big, b.h, tokens, kMiddle, type, workers,
         [&](const Activations& x) { multiply(layer.down, x, b.y.data(), kHidden, {}, workers); });
  }
  step(watch, b.small, b.x, head_tokens, kHidden, type, workers,
       [&](const Activations& x) { multiply(model.head, x, b.logits.data(), kVocab, {}, workers); });
}

void bench_type(WeightType type, double bandwidth, double limit, Workers& workers) {
  const auto start = Clock::now();
  const Model model = make_model(type, workers);
  std::printf("# %s: %.1f MB, packed in %.2f s\n", weight_type_name(type), static_cast<double>(model.bytes) * 1e-6, seconds_since(start));
  const double layer_weights = kLayers * (kHidden * kQkv + kHidden * kHidden + 3.0 * kHidden * kMiddle),
               head_weights = 1.0 * kHidden * kVocab;
  for (const std::int64_t tokens : {1, 2, 4, 8, 16, 32, 64, 512}) {
    const std::int64_t head_tokens = tokens > 64 ? 1 : tokens;  // prefill wants the last token's logits only
    Buffers b;
    b.x = random_inputs(tokens * kHidden);
    b.h = random_inputs(tokens * kMiddle);
    b.y.resize(static_cast<std::size_t>(tokens * kMiddle));
    b.logits.resize(static_cast<std::size_t>(head_tokens * kVocab));
    Stopwatch watch;
    watch.measure(limit, [&](Stopwatch& w) { pass(model, type, tokens, head_tokens, b, workers, w); });
    const double flops = 2 * (layer_weights * static_cast<double>(tokens) + head_weights * static_cast<double>(head_tokens));
    const double rate = static_cast<double>(model.bytes) / watch.least();
    std::printf("%-5s %6ld %10.2f %10.2f %10.1f %8.1f %8.1f %10.1f\n", weight_type_name(type), static_cast<long>(tokens),
                watch.median() * 1e3, watch.least() * 1e3, static_cast<double>(tokens) / watch.least(), rate * 1e-9, 100 * rate / bandwidth,
                flops / watch.least() * 1e-9);
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
