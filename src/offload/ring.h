#pragma once
// Linux's io_uring by its system calls: two rings in memory shared with the kernel. Used by one thread.
#include <linux/io_uring.h>

#include <cstddef>
#include <cstdint>

namespace unshard::offload {

class Ring {
 public:
  /// \throws FileError  not permitted, not there, or too old (before 5.6, which has plain reads and writes)
  explicit Ring(unsigned entries);
  ~Ring();
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  /// A cleared entry that the next submit() hands over. The caller keeps at most `entries` under way, so there always is one.
  io_uring_sqe& next();
  /// Hand over what next() gave, and return when something is done. \return 0, or errno
  int submit_and_wait();
  /// \return whether there was something done
  bool reap(std::uint64_t& user_data, std::int32_t& result);

 private:
  void* map(std::size_t bytes, std::uint64_t at, const char* what);
  void unmap();
  struct Mapping {
    void* data = nullptr;
    std::size_t bytes = 0;
  };
  int fd_ = -1;
  io_uring_params params_{};
  Mapping submissions_, completions_, entries_;
  unsigned tail_ = 0, handed_ = 0;  ///< of the submission ring: filled, and taken by the kernel
  unsigned *sq_tail_ = nullptr, *sq_array_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
  unsigned sq_mask_ = 0, cq_mask_ = 0;
  io_uring_sqe* sqes_ = nullptr;
  io_uring_cqe* cqes_ = nullptr;
};

}  // namespace unshard::offload
