#include "offload/ring.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <memory>

#include "unshard/core/error.h"
#include "unshard/offload/async_file.h"

namespace unshard::offload {
namespace {

unsigned* field(void* ring, unsigned offset) { return reinterpret_cast<unsigned*>(static_cast<std::byte*>(ring) + offset); }

}  // namespace

Ring::Ring(unsigned entries) {
  fd_ = static_cast<int>(::syscall(__NR_io_uring_setup, entries, &params_));
  if (fd_ < 0) throw FileError(std::strerror(errno), errno);
  try {
    if (!(params_.features & IORING_FEAT_RW_CUR_POS))
      throw FileError("the kernel's is older than 5.6", ENOSYS);  // came with IORING_OP_READ
    const bool single = params_.features & IORING_FEAT_SINGLE_MMAP;
    std::size_t sq_bytes = params_.sq_off.array + params_.sq_entries * sizeof(unsigned);
    const std::size_t cq_bytes = params_.cq_off.cqes + params_.cq_entries * sizeof(io_uring_cqe);
    if (single) sq_bytes = std::max(sq_bytes, cq_bytes);
    submissions_ = {map(sq_bytes, IORING_OFF_SQ_RING, "submissions"), sq_bytes};
    if (!single) completions_ = {map(cq_bytes, IORING_OFF_CQ_RING, "completions"), cq_bytes};
    entries_ = {map(params_.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES, "entries"), params_.sq_entries * sizeof(io_uring_sqe)};
  } catch (...) {
    unmap();
    throw;
  }
  void *sq = submissions_.data, *cq = completions_.data ? completions_.data : sq;
  sq_tail_ = field(sq, params_.sq_off.tail);
  sq_array_ = field(sq, params_.sq_off.array);
  sq_mask_ = *field(sq, params_.sq_off.ring_mask);
  cq_head_ = field(cq, params_.cq_off.head);
  cq_tail_ = field(cq, params_.cq_off.tail);
  cq_mask_ = *field(cq, params_.cq_off.ring_mask);
  cqes_ = reinterpret_cast<io_uring_cqe*>(static_cast<std::byte*>(cq) + params_.cq_off.cqes);
  sqes_ = static_cast<io_uring_sqe*>(entries_.data);
}

Ring::~Ring() { unmap(); }

void* Ring::map(std::size_t bytes, std::uint64_t at, const char* what) {
  void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, static_cast<off_t>(at));
  if (data == MAP_FAILED) throw FileError(cat("its ", what, " can't be mapped: ", std::strerror(errno)), errno);
  return data;
}

void Ring::unmap() {
  for (const auto& mapping : {submissions_, completions_, entries_})
    if (mapping.data) ::munmap(mapping.data, mapping.bytes);
  ::close(fd_);
}

io_uring_sqe& Ring::next() {
  UNSHARD_DCHECK(tail_ - handed_ < params_.sq_entries, "the submission ring is full");
  const unsigned index = tail_++ & sq_mask_;
  sq_array_[index] = index;
  return *std::construct_at(&sqes_[index]);
}

int Ring::submit_and_wait() {
  std::atomic_ref(*sq_tail_).store(tail_, std::memory_order_release);
  const auto taken = ::syscall(__NR_io_uring_enter, fd_, tail_ - handed_, 1, IORING_ENTER_GETEVENTS, nullptr, 0);
  if (taken < 0) return errno;
  handed_ += static_cast<unsigned>(taken);
  return 0;
}

bool Ring::reap(std::uint64_t& user_data, std::int32_t& result) {
  const unsigned head = *cq_head_;  // only this thread moves it
  if (head == std::atomic_ref(*cq_tail_).load(std::memory_order_acquire)) return false;
  const io_uring_cqe& entry = cqes_[head & cq_mask_];
  user_data = entry.user_data;
  result = entry.res;
  std::atomic_ref(*cq_head_).store(head + 1, std::memory_order_release);
  return true;
}

}  // namespace unshard::offload
