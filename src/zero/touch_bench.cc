// What a touch costs: operators on a resident partitioned parameter against the same ones on a plain tensor, in one process.
// Usage: touch_bench [repetitions]. Prints median, min and max over 21 rounds, ns an operator.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <functional>
#include <vector>

#include "comm/testing.h"
#include "unshard/zero/parameter_store.h"

namespace {

// CPU time of this thread: a loaded machine disturbs it least.
double cpu_ns() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e9 + static_cast<double>(now.tv_nsec);
}

double round_ns(int repetitions, const std::function<void()>& op) {
  const double start = cpu_ns();
  for (int i = 0; i < repetitions; ++i) op();
  return (cpu_ns() - start) / repetitions;
}

void compare(const char* name, int repetitions, const std::function<void()>& plain, const std::function<void()>& touched) {
  std::vector<double> without, with, added;
  for (int round = 0; round < 22; ++round) {  // interleaved; the first warms up
    const double a = round_ns(repetitions, plain), b = round_ns(repetitions, touched);
    if (round == 0) continue;
    without.push_back(a), with.push_back(b), added.push_back(b - a);
  }
  for (auto* values : {&without, &with, &added}) std::sort(values->begin(), values->end());
  const auto middle = added.size() / 2;
  std::printf("%-34s plain %8.0f   touched %8.0f   added median %6.0f  min %6.0f  max %6.0f ns\n", name, without[middle], with[middle],
              added[middle], added.front(), added.back());
}

}  // namespace

int main(int argc, char** argv) {
  const int repetitions = argc > 1 ? std::atoi(argv[1]) : 20'000;
  at::set_num_threads(1);
  for (const bool shared : {true, false}) {
    unshard::CommOptions options;
    options.share_memory = shared;
    unshard::testing::run_ranks(2, options, [&](int rank, unshard::Communicator& comm) {
      auto store = unshard::ParameterStore::create(std::shared_ptr<unshard::Communicator>(std::shared_ptr<void>(), &comm));
      const auto dense = at::ones({16, 16}), x = at::ones({16, 16}), other = at::ones({16, 16});
      std::vector<at::Tensor> list(8), dense_list(8, dense);
      auto w = dense.clone();
      store->add(w, "w", true);
      for (auto& tensor : list) {
        tensor = dense.clone();
        store->add(tensor, "listed", true);
      }
      if (!at::equal(w.mm(x), dense.mm(x))) std::abort();
      comm.barrier("both ranks are ready");
      if (rank == 0) {
        const at::NoGradGuard no_grad;
        std::printf("# 2 ranks (one measures), %s memory, %d repetitions\n", shared ? "shared" : "private", repetitions);
        compare(
            "mm 16x16", repetitions, [&] { dense.mm(x); }, [&] { w.mm(x); });
        compare(
            "linear 16x16", repetitions, [&] { at::linear(x, dense); }, [&] { at::linear(x, w); });
        compare(
            "add 16x16", repetitions, [&] { dense.add(x); }, [&] { w.add(x); });
        compare(
            "t (a view)", repetitions, [&] { dense.t(); }, [&] { w.t(); });
        compare(
            "foreach_mul of 8 (per operator)", repetitions / 4, [&] { at::_foreach_mul(dense_list, 2.0); },
            [&] { at::_foreach_mul(list, 2.0); });
        compare(
            "mm without a parameter", repetitions, [&] { dense.mm(x); }, [&] { other.mm(x); });
      }
      comm.barrier("end");
    });
  }
}
