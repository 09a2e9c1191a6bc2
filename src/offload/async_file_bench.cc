// How fast is a file read and written in the background? Prints GB/s by method, pieces at once and their size, past the page cache:
//   unshard_async_file_bench FOLDER [MB]
// Beside it: dd if=FILE of=/dev/null bs=4M iflag=direct
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "unshard/offload/async_file.h"

namespace {

using namespace unshard::offload;

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

/// Requests of 16 MB, four under way, over the whole file.
double run(AsyncQueue& queue, const AsyncFile& file, const std::vector<AlignedBuffer>& buffers, bool write) {
  const auto size = buffers.front().bytes(), count = file.bytes() / size;
  std::vector<AsyncQueue::Ticket> tickets(buffers.size());
  const double start = seconds();
  for (std::int64_t i = 0; i < count + static_cast<std::int64_t>(buffers.size()); ++i) {
    const auto slot = static_cast<std::size_t>(i) % buffers.size();
    if (i >= static_cast<std::int64_t>(buffers.size())) queue.wait(tickets[slot]);
    if (i >= count) continue;
    auto* memory = buffers[slot].data();
    tickets[slot] = write ? queue.write(file, i * size, size, memory) : queue.read(file, i * size, size, memory);
  }
  return static_cast<double>(count * size) / 1e9 / (seconds() - start);
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) return std::fprintf(stderr, "usage: %s FOLDER [MB]\n", argv[0]), 2;
  const std::int64_t bytes = (argc > 2 ? std::atoll(argv[2]) : 512) << 20;
  const auto path = std::string(argv[1]) + "/unshard_async_file_bench";
  std::vector<AlignedBuffer> buffers;
  for (int i = 0; i < 4; ++i) std::memset(buffers.emplace_back(std::int64_t{16} << 20).data(), i + 1, std::size_t{16} << 20);
  const AsyncFile file(path, Access::write);
  file.reserve(bytes);
  file.resize(bytes);
  std::printf("%-58s %10s %10s\n", "", "read GB/s", "write GB/s");
  for (const Method method : {Method::uring, Method::threads}) {
    for (const std::int64_t depth : {1, 4, 32}) {
      for (const std::int64_t piece : {256 << 10, 1 << 20, 4 << 20}) {
        AsyncQueue queue({.method = method, .queue_depth = depth, .piece_bytes = piece, .threads = depth});
        std::vector<double> read, written;
        run(queue, file, buffers, true);
        for (int i = 0; i < 3; ++i) written.push_back(run(queue, file, buffers, true)), read.push_back(run(queue, file, buffers, false));
        std::printf("%-58s %10.2f %10.2f\n", queue.describe().c_str(), median(read), median(written));
      }
    }
  }
  std::printf("%s\n", file.describe().c_str());
  std::filesystem::remove(path);
}
