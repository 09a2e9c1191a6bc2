// How fast is attention? unshard_attention_bench [THREADS = 2] [REPEATS = 9]
// Shapes of SmolLM2-135M: 9 query heads, 3 KV heads of 64 features. Seed fixed, one warm-up call, then median, min and max over the
// repeats. Decode reads the caches of 30 layers in turn, so that they come from memory, and is told beside what a plain read of memory
// reaches; prefill beside what multiply-adds in registers reach. Each result is compared with the portable kernels' on its first layer.
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "core/cpu_isa.h"
#include "inference/kernels/attention_internal.h"

namespace {

using namespace unshard::inference;  // a bench of one file

constexpr std::int64_t kHeads = 9, kKvHeads = 3, kSize = 64, kLayers = 30;
constexpr std::int64_t kFeatures = kHeads * kSize, kKvFeatures = kKvHeads * kSize;

struct Times {
  double median, least, most;
};
Times time_of(int repeats, const std::function<void()>& call) {
  call();
  std::vector<double> ms;
  for (int i = 0; i < repeats; ++i) {
    const auto start = std::chrono::steady_clock::now();
    call();
    ms.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
  }
  std::sort(ms.begin(), ms.end());
  return {ms[ms.size() / 2], ms.front(), ms.back()};
}

/// GB/s of reading 512 MB on all workers.
double read_bandwidth(int repeats, Workers& workers) {
  const std::vector<std::uint64_t> memory(std::size_t{64} << 20, 1);
  std::vector<std::uint64_t> sums(static_cast<std::size_t>(workers.count()) * 8);
  const auto times = time_of(repeats, [&] {
    workers.run([&](std::int64_t worker) {
      const auto n = static_cast<std::int64_t>(memory.size()) / workers.count() / 64 * 64;
      const std::uint64_t* p = memory.data() + worker * n;
      std::uint64_t s[8] = {};
      for (std::int64_t i = 0; i < n; i += 8)
        for (int k = 0; k < 8; ++k) s[k] += p[i + k];
      for (int k = 0; k < 8; ++k) sums[static_cast<std::size_t>(worker * 8 + k)] += s[k];
    });
  });
  return static_cast<double>(memory.size()) * 8 / times.least / 1e6;
}

constexpr int kChains = 12, kRounds = 100000;
/// Twelve chains of multiply-adds, in vectors of V.
template <class V>
[[gnu::always_inline]] inline float chains(float seed) {
  V sums[kChains];
  for (int k = 0; k < kChains; ++k) sums[k] = V{} + seed * static_cast<float>(k);
  V factor = V{} + seed;
  for (int i = 0; i < kRounds; ++i) {
#pragma GCC unroll 12
    for (int k = 0; k < kChains; ++k) sums[k] = sums[k] * factor + factor;
    asm volatile("" : "+x"(factor));
  }
  float total = 0;
  for (const V& sum : sums) total += sum[0];
  return total;
}
using V16 = float __attribute__((vector_size(64)));
using V8 = float __attribute__((vector_size(32)));
using V4 = float __attribute__((vector_size(16)));
#if defined(__x86_64__)
[[gnu::target("avx512f,fma")]] float chains512(float seed) { return chains<V16>(seed); }
[[gnu::target("avx2,fma")]] float chains256(float seed) { return chains<V8>(seed); }
#endif
float chains128(float seed) { return chains<V4>(seed); }

/// GFLOP/s of fp32 multiply-adds of this instruction set on all workers.
double fma_peak(int repeats, Workers& workers) {
  float (*f)(float) = chains128;
  double lanes = 4;
#if defined(__x86_64__)
  const auto isa = unshard::kernels::selected_isa();
  if (isa != unshard::kernels::Isa::portable) {
    f = isa == unshard::kernels::Isa::avx512 ? chains512 : chains256;
    lanes = isa == unshard::kernels::Isa::avx512 ? 16 : 8;
  }
#endif
  std::vector<float> results(static_cast<std::size_t>(workers.count()) * 16);
  const auto times =
      time_of(repeats, [&] { workers.run([&](std::int64_t worker) { results[static_cast<std::size_t>(worker * 16)] = f(0.5F); }); });
  return 2.0 * kChains * kRounds * lanes * static_cast<double>(workers.count()) / times.least / 1e6;
}

/// `sequences` of `context` tokens in `layers` caches, of which the last `rows` are computed.
struct Case {
  KvType type;
  std::int64_t sequences, context, rows, layers;

  std::int64_t blocks_each() const { return (context + 15) / 16; }
  std::int64_t layer_bytes() const { return sequences * blocks_each() * kv_block_bytes(type, kKvHeads, kSize); }
};

/// Memory in huge pages where the system has them, as an engine's cache should be: with small ones decode waits for page tables.
struct HugeFree {
  void operator()(char* p) const { std::free(p); }
};
using Huge = std::unique_ptr<char, HugeFree>;
Huge huge(std::int64_t bytes) {
  constexpr std::size_t kPage = std::size_t{2} << 20;
  const std::size_t rounded = (static_cast<std::size_t>(bytes) + kPage - 1) / kPage * kPage;
  auto* memory = static_cast<char*>(std::aligned_alloc(kPage, rounded));
  madvise(memory, rounded, MADV_HUGEPAGE);
  return Huge(memory);
}

struct Run {
  Case shape;
  std::vector<Huge> caches;
  std::vector<std::int32_t> tables;
  std::vector<AttentionSpan> spans;
  std::vector<float> q, out;
  AttentionOptions options = {0.125F, 0, 0};

  Run(const Case& shape, Workers& workers) : shape(shape), tables(static_cast<std::size_t>(shape.sequences * shape.blocks_each())) {
    std::mt19937 random(1);
    std::iota(tables.begin(), tables.end(), 0);
    std::shuffle(tables.begin(), tables.end(), random);
    std::normal_distribution<float> normal;
    std::vector<float> kv(static_cast<std::size_t>(shape.context * 2 * kKvFeatures));
    for (auto& x : kv) x = normal(random);
    q.resize(static_cast<std::size_t>(shape.sequences * shape.rows * kFeatures));
    for (auto& x : q) x = normal(random);
    out.resize(q.size());
    for (std::int64_t l = 0; l < shape.layers; ++l) {
      caches.push_back(huge(shape.layer_bytes()));
      for (std::int64_t s = 0; s < shape.sequences; ++s) {
        const AttentionSpan all = {0, shape.context, 0, tables.data() + s * shape.blocks_each()};
        kv_store(layer(l), {&all, 1}, kv.data(), kv.data() + kKvFeatures, 2 * kKvFeatures, workers);
      }
    }
    for (std::int64_t s = 0; s < shape.sequences; ++s)
      spans.push_back({s * shape.rows, shape.rows, shape.context - shape.rows, tables.data() + s * shape.blocks_each()});
  }
  KvLayer layer(std::int64_t l) { return {caches[static_cast<std::size_t>(l)].get(), shape.type, kKvHeads, kSize}; }
  void compute(std::int64_t l, const AttentionKernels& kernels, Workers& workers) {
    attention_with(kernels, 0, layer(l), spans, q.data(), kFeatures, kHeads, out.data(), kFeatures, options, workers);
  }
  double worst_difference(Workers& workers) {
    compute(0, attention_kernels_portable(), workers);
    const auto wanted = out;
    compute(0, attention_kernels(), workers);
    double worst = 0;
    for (std::size_t i = 0; i < out.size(); ++i) worst = std::max<double>(worst, std::abs(out[i] - wanted[i]));
    return worst;
  }
};

const char* name_of(KvType type) { return type == KvType::f32 ? "f32" : type == KvType::bf16 ? "bf16" : "int8"; }

void measure(const Case& shape, int repeats, double peak_bandwidth, double peak_flops, Workers& workers) {
  Run run(shape, workers);
  const bool wrong = !(run.worst_difference(workers) < 1e-5);
  const auto times = time_of(repeats, [&] {
    for (std::int64_t l = 0; l < shape.layers; ++l) run.compute(l, attention_kernels(), workers);
  });
  const double per_layer = times.median / static_cast<double>(shape.layers);
  double keys = 0;
  for (std::int64_t r = 0; r < shape.rows; ++r) keys += static_cast<double>(shape.context - shape.rows + r + 1);
  const double gflops = 4.0 * kSize * kHeads * keys * static_cast<double>(shape.sequences) / per_layer / 1e6;
  const double bandwidth = static_cast<double>(shape.layer_bytes()) / per_layer / 1e6;
  std::printf("%-5s %9ld %8ld %6ld %10.3f %10.3f %10.3f %8.1f %5.0f %9.1f %5.0f  %s\n", name_of(shape.type), long(shape.sequences),
              long(shape.context), long(shape.rows), per_layer, times.least / static_cast<double>(shape.layers),
              times.most / static_cast<double>(shape.layers), bandwidth, 100 * bandwidth / peak_bandwidth, gflops,
              100 * gflops / peak_flops, wrong ? "WRONG" : "");
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  const std::int64_t threads = argc > 1 ? std::atol(argv[1]) : 2;
  const int repeats = argc > 2 ? std::atoi(argv[2]) : 9;
  Workers workers(threads);
  const double bandwidth = read_bandwidth(repeats, workers), flops = fma_peak(repeats, workers);
  std::printf("# %ld threads, isa %d; read %.1f GB/s, fp32 multiply-add %.1f GFLOP/s\n", long(threads),
              static_cast<int>(unshard::kernels::selected_isa()), bandwidth, flops);
  std::printf("# cache sequences  context   rows  median_ms     min_ms     max_ms     GB/s     %%   GFLOP/s     %%   a layer\n");
  for (const KvType type : {KvType::bf16, KvType::int8, KvType::f32}) {
    measure({type, 8, 1000, 1, kLayers}, repeats, bandwidth, flops, workers);
    measure({type, 1, 1000, 1, kLayers}, repeats, bandwidth, flops, workers);
    measure({type, 1, 8000, 1, kLayers}, repeats, bandwidth, flops, workers);
    for (const std::int64_t context : {512, 1024, 2000}) measure({type, 1, context, 512, 1}, repeats, bandwidth, flops, workers);
  }
}
