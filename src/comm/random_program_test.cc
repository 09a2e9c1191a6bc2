// Random programs of collectives: whatever the order, sizes and dtypes, every rank ends with what the definitions say, on both transports.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <numeric>
#include <random>

#include "comm/testing.h"
#include "core/soak.h"
#include "unshard/comm/communicator.h"

namespace unshard {
namespace {

using testing::soak;

/// Every rank's integers are a function of (seed, rank), so that any rank can work out all inputs.
at::Tensor input_of(std::uint64_t seed, int rank, std::int64_t numel, at::ScalarType dtype) {
  const auto step = static_cast<std::int64_t>(seed % 13 + 1), shift = static_cast<std::int64_t>((seed / 13) % 17);
  return ((at::arange(numel, at::kLong) * step + rank * 5 + shift) % 9).to(dtype);
}

class RandomProgram {
 public:
  RandomProgram(std::uint64_t seed, int rank, Communicator& comm) : random_(seed), rank_(rank), size_(comm.world_size()), comm_(comm) {}

  void step() {
    const std::uint64_t seed = random_();
    const std::int64_t numel = pick({0, 1, 7, 64, 1000, 40'000, 140'000});
    const auto dtype = std::array{at::kFloat, at::kBFloat16, at::kHalf, at::kDouble, at::kInt}[random_() % 5];
    SCOPED_TRACE(::testing::Message() << "numel " << numel << ' ' << dtype);
    switch (random_() % 7) {
      case 0:
        return all_gather(seed, numel, dtype);
      case 1:
        return reduce_scatter(seed, numel, dtype);
      case 2:
        return all_reduce(seed, numel, dtype);
      case 3:
        return broadcast(seed, numel, dtype);
      case 4:
        return all_to_all(seed, numel, dtype);
      case 5:
        return exchange_strings(seed);
      default:
        return comm_.check_all_in("step " + std::to_string(seed));
    }
  }

 private:
  std::int64_t pick(std::initializer_list<std::int64_t> from) { return *(from.begin() + random_() % from.size()); }

  at::Tensor sum(std::uint64_t seed, std::int64_t numel, at::ScalarType dtype) const {
    at::Tensor total = at::zeros({numel}, at::kLong);
    for (int r = 0; r < size_; ++r) total += input_of(seed, r, numel, at::kLong);
    return total.to(dtype);
  }
  void all_gather(std::uint64_t seed, std::int64_t numel, at::ScalarType dtype) {
    at::Tensor output = at::full({numel * size_}, 99, dtype);
    comm_.all_gather(output, input_of(seed, rank_, numel, dtype));
    std::vector<at::Tensor> parts;
    for (int r = 0; r < size_; ++r) parts.push_back(input_of(seed, r, numel, dtype));
    EXPECT_TRUE(at::equal(output, at::cat(parts)));
  }
  void reduce_scatter(std::uint64_t seed, std::int64_t numel, at::ScalarType dtype) {
    at::Tensor output = at::full({numel}, 99, dtype);
    comm_.reduce_scatter(output, input_of(seed, rank_, numel * size_, dtype));
    EXPECT_TRUE(at::equal(output, sum(seed, numel * size_, dtype).narrow(0, numel * rank_, numel)));
  }
  void all_reduce(std::uint64_t seed, std::int64_t numel, at::ScalarType dtype) {
    at::Tensor tensor = input_of(seed, rank_, numel, dtype);
    comm_.all_reduce(tensor);
    EXPECT_TRUE(at::equal(tensor, sum(seed, numel, dtype)));
  }
  void broadcast(std::uint64_t seed, std::int64_t numel, at::ScalarType dtype) {
    const int root = static_cast<int>(random_() % static_cast<std::uint64_t>(size_));
    at::Tensor tensor = input_of(seed, rank_, numel, dtype);
    comm_.broadcast(tensor, root);
    EXPECT_TRUE(at::equal(tensor, input_of(seed, root, numel, dtype)));
  }
  void all_to_all(std::uint64_t seed, std::int64_t numel, at::ScalarType dtype) {
    at::Tensor output = at::full({numel * size_}, 99, dtype);
    comm_.all_to_all(output, input_of(seed, rank_, numel * size_, dtype));
    std::vector<at::Tensor> parts;
    for (int r = 0; r < size_; ++r) parts.push_back(input_of(seed, r, numel * size_, dtype).narrow(0, numel * rank_, numel));
    EXPECT_TRUE(at::equal(output, at::cat(parts)));
  }
  void exchange_strings(std::uint64_t seed) {
    const auto text = [&](int r) { return std::string((seed + static_cast<std::uint64_t>(r) * 777) % 9000, static_cast<char>('a' + r)); };
    const auto all = comm_.all_gather_strings(text(rank_));
    for (int r = 0; r < size_; ++r) EXPECT_EQ(all[static_cast<std::size_t>(r)], text(r));
  }

  std::mt19937_64 random_;
  const int rank_, size_;
  Communicator& comm_;
};

void run_programs(const std::vector<int>& hosts, bool share, int steps) {
  CommOptions options;
  options.share_memory = share;
  const std::uint64_t seed = 20 + static_cast<std::uint64_t>(std::accumulate(hosts.begin(), hosts.end(), 0));
  testing::run_hosts(
      hosts, options,
      [&](int rank, Communicator& comm) {
        RandomProgram program(seed, rank, comm);
        for (int i = 0; i < steps * soak(); ++i) {
          SCOPED_TRACE(::testing::Message() << "rank " << rank << " step " << i << " seed " << seed);
          program.step();
        }
      },
      60.0 * soak());
}

TEST(RandomPrograms, SharedMemory2) { run_programs({2}, true, 120); }
TEST(RandomPrograms, SharedMemory3) { run_programs({3}, true, 80); }
TEST(RandomPrograms, SharedMemory4) { run_programs({4}, true, 60); }
TEST(RandomPrograms, Gloo2) { run_programs({2}, false, 40); }
TEST(RandomPrograms, Gloo3) { run_programs({3}, false, 30); }
TEST(RandomPrograms, Hosts1And1) { run_programs({1, 1}, true, 30); }
TEST(RandomPrograms, Hosts2And2) { run_programs({2, 2}, true, 40); }
TEST(RandomPrograms, Hosts1And3) { run_programs({1, 3}, true, 40); }
TEST(RandomPrograms, Hosts2And1And1) { run_programs({2, 1, 1}, true, 40); }

}  // namespace
}  // namespace unshard
