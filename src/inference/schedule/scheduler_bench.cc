// What scheduling costs a step: 256 running sequences that each generate, with and without a stream of prompts beside them.
//
//   scheduler_bench
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <random>

#include "inference/schedule/scheduler.h"

namespace {

using namespace unshard::inference;

/// Median, 99th percentile and maximum in microseconds of next() + finish_step().
void measure(const char* name, std::int64_t prompt, std::int64_t arrivals_per_step) {
  constexpr std::int64_t kRunning = 256, kSteps = 500, kMost = 600;
  Scheduler scheduler({.blocks = kRunning * 2 * (prompt + kMost) / 16, .step_tokens = 2048, .max_sequences = kRunning});
  std::mt19937 random(1);
  SequenceId last = 0;
  const auto add = [&] {
    std::vector<Token> tokens(static_cast<std::size_t>(prompt));
    for (auto& token : tokens) token = static_cast<Token>(random() % 50000);
    scheduler.add({++last, std::move(tokens), kMost, 0, 0});
  };
  for (std::int64_t i = 0; i < kRunning; ++i) add();
  std::vector<double> times;
  std::vector<Chosen> chosen;
  SequenceId oldest = 1;
  while (static_cast<std::int64_t>(times.size()) < kSteps) {
    const auto begin = std::chrono::steady_clock::now();
    const Step step = scheduler.next();
    const auto planned = std::chrono::steady_clock::now();
    chosen.clear();
    for (const Chunk& chunk : step.chunks) {
      if (chunk.wants_token) chosen.push_back({chunk.sequence, {static_cast<Token>(random() % 50000)}});
    }
    const auto computed = std::chrono::steady_clock::now();
    scheduler.finish_step(chosen);
    const auto end = std::chrono::steady_clock::now();
    if (scheduler.counts().running == kRunning) {
      times.push_back(std::chrono::duration<double, std::micro>((planned - begin) + (end - computed)).count());
      for (std::int64_t i = 0; i < arrivals_per_step; ++i) {
        scheduler.remove(oldest++);
        add();
      }
    }
  }
  std::sort(times.begin(), times.end());
  std::printf("%-40s %8zu %10.1f %10.1f %10.1f\n", name, times.size(), times[times.size() / 2], times[times.size() * 99 / 100],
              times.back());
}

}  // namespace

int main() {
  std::printf("# next() + finish_step(), 256 sequences running             steps  median_us     p99_us     max_us\n");
  measure("prompts of 100 tokens", 100, 0);
  measure("prompts of 2,000 tokens", 2000, 0);
  measure("prompts of 100, two arrive a step", 100, 2);
}
