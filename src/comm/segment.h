#pragma once
// Memory of a memfd, mapped once with room to grow.
#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <string>

#include "comm/unique_fd.h"
#include "unshard/comm/host_group.h"

namespace unshard::comm {

/// Whether a segment's first bytes are allocated at once, so that a lack of memory is an error and not a SIGBUS later.
enum class Backing {
  allocated,  ///< fallocate
  sparse,     ///< pages come when first touched; for control areas that are mostly unused
};

class MemfdSegment final : public SharedSegment {
 public:
  /// \throws CommError
  static std::shared_ptr<MemfdSegment> create(std::string name, std::size_t bytes, std::size_t limit_bytes, Backing backing);
  /// Map a segment that another process made.
  static std::shared_ptr<MemfdSegment> map(UniqueFd fd, std::string name, std::size_t limit_bytes);
  ~MemfdSegment() override;

  std::byte* data() const override { return base_; }
  std::size_t size() const override;
  void reserve(std::size_t bytes) override;
  int fd() const { return fd_.get(); }

 private:
  MemfdSegment(UniqueFd fd, std::string name, std::size_t limit_bytes);
  void extend(std::size_t bytes);

  UniqueFd fd_;
  std::string name_;
  std::size_t limit_ = 0;
  std::byte* base_ = nullptr;
  std::atomic<std::size_t> reserved_{0};  ///< what this process knows to be there, so that reserve() is cheap
  std::mutex mutex_;                      ///< one grower a process; between processes fallocate never shrinks
};

}  // namespace unshard::comm
