#pragma once
// What an AsyncFile holds, for the transfers that keep it open.
#include <atomic>
#include <cstdint>
#include <string>

#include "unshard/offload/async_file.h"

namespace unshard::offload {

/// [Note: two descriptors] Direct transfers want offset, length and memory in whole blocks. What isn't goes through the page cache on a
/// descriptor of its own, which Linux keeps coherent with direct transfers as long as they don't overlap in time: they never do here, since
/// the pieces of a request are apart, and requests that overlap are the caller's to order.
struct AsyncFile::Held {
  std::string path;
  int cached = -1, direct = -1;  ///< direct: -1 where the file system has none
  bool writable = false;
  int direct_refused_by = 0;                  ///< errno of the open
  std::atomic<bool> transfer_refused{false};  ///< the flag was taken, a transfer wasn't (EINVAL): no more direct ones

  Held() = default;
  ~Held();
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  bool takes_direct() const { return direct >= 0 && !transfer_refused; }
};

/// "PATH: WHAT: " and the text of `code` (0: none).
FileError file_error(const std::string& path, const std::string& what, int code);
[[noreturn]] void fail_file(const std::string& path, const std::string& what, int code);
/// With how much is free, where that is the reason.
std::string reason_of(const std::string& path, int code);

}  // namespace unshard::offload
