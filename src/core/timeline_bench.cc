// What a span costs: off, on, and on from several threads at once; and what writing one to the file costs.
//
//   ninja -C build unshard_timeline_bench && build/bin/unshard_timeline_bench
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <thread>
#include <vector>

#include "unshard/core/timeline.h"

namespace {

using unshard::Lane;
using unshard::Timeline;
using unshard::TimelineSpan;

constexpr int kSpans = 1 << 15;

template <class Function>
double ns_per_span(int spans, Function&& function) {
  const auto begin = std::chrono::steady_clock::now();
  function();
  return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - begin).count() / spans;
}

void record(Timeline& timeline, int spans) {
  for (int i = 0; i < spans; ++i) const TimelineSpan span(timeline, Lane::gather, "wait", "blocks.17.attention.qkv.weight", i);
}

}  // namespace

int main() {
  Timeline timeline;
  std::printf("off                  %8.2f ns a span\n", ns_per_span(1 << 26, [&] { record(timeline, 1 << 26); }));
  const auto folder = std::filesystem::temp_directory_path() / "unshard_timeline_bench";
  unshard::TimelineOptions options;
  options.directory = folder.string();
  options.capacity = kSpans;
  timeline.open(options);
  for (int round = 0; round < 3; ++round) {
    std::printf("on                   %8.2f ns a span\n", ns_per_span(kSpans, [&] { record(timeline, kSpans); }));
    std::printf("to the file          %8.2f ns a span\n", ns_per_span(kSpans, [&] { timeline.flush(); }));
    std::vector<std::thread> threads;
    const double together = ns_per_span(kSpans, [&] {
      for (int t = 0; t < 4; ++t) threads.emplace_back([&] { record(timeline, kSpans / 4); });
      for (auto& thread : threads) thread.join();
    });
    std::printf("on, from 4 threads   %8.2f ns a span (wall)\n", together);
    timeline.flush();
  }
  timeline.close();
  std::filesystem::remove_all(folder);
}
