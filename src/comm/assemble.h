#pragma once
// How ranks of several processes become a communicator.
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "comm/aside.h"
#include "unshard/comm/communicator.h"
#include "unshard/core/error.h"
#include "unshard/core/log.h"

namespace unshard::comm {

HostGroupOptions host_options(const CommOptions& options);

/// Collective. `place` is for messages: "make_communicator". `group` may be null: then Gloo is set up unless shared memory serves.
std::shared_ptr<Communicator> assemble(const std::string& place, int rank, int size, c10::intrusive_ptr<c10d::Store> store,
                                       c10::intrusive_ptr<c10d::ProcessGroup> group, const CommOptions& options);

inline constexpr double kStoreReported_s = 5;

/// What `function`, which uses the store, returns; CommError when that takes longer than the time-out.
template <class Function>
auto ask_store(const std::string& place, int rank, int size, const CommOptions& options, Function function) {
  bool reported = false;
  const auto check = [&](double waited_s) {
    if (options.interrupt_check) options.interrupt_check();
    if (rank == 1 && !reported && waited_s > kStoreReported_s) {  // one of those that wait says so
      reported = true;
      log_warning(rank, cat("[comm.", place, "] no progress for ", kStoreReported_s, " s, still waiting (until ", options.timeout.count(),
                            " s): rank 0, which serves the store unless the launcher does, hasn't come or doesn't answer"));
    }
    if (waited_s > options.timeout.count() + 1)  // the store's own time-out comes first
      throw CommError(cat("[comm.", place, "] the store doesn't answer within ", options.timeout.count(),
                          " s: rank 0, which serves it unless the launcher does, is stopped or can't be reached; this is rank ", rank,
                          " of ", size));
  };
  return aside(std::move(function), check);
}

}  // namespace unshard::comm
