#include "comm/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "unshard/core/error.h"

namespace unshard::comm {

namespace {

std::size_t round_up_to_page(std::size_t bytes) {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return (bytes + page - 1) / page * page;
}

std::string mebibytes(std::size_t bytes) { return cat(bytes, " bytes (", (bytes + (1 << 20) - 1) >> 20, " MiB)"); }

std::size_t file_size(int fd) {
  struct stat status {};
  if (::fstat(fd, &status) != 0) throw CommError(cat("[comm.segment] fstat: ", std::strerror(errno)));
  return static_cast<std::size_t>(status.st_size);
}

}  // namespace

std::shared_ptr<MemfdSegment> MemfdSegment::create(std::string name, std::size_t bytes, std::size_t limit_bytes, Backing backing) {
  UniqueFd fd(::memfd_create(("unshard:" + name).substr(0, 200).c_str(), MFD_CLOEXEC));
  if (!fd) throw CommError(cat("[comm.create_segment '", name, "'] memfd_create: ", std::strerror(errno)));
  std::shared_ptr<MemfdSegment> segment(new MemfdSegment(std::move(fd), std::move(name), std::max(bytes, limit_bytes)));
  if (backing == Backing::allocated) {
    segment->reserve(bytes);
  } else if (::ftruncate(segment->fd_.get(), static_cast<off_t>(round_up_to_page(bytes))) != 0) {
    throw CommError(cat("[comm.create_segment '", segment->name_, "'] ftruncate to ", mebibytes(bytes), ": ", std::strerror(errno)));
  }
  return segment;
}

std::shared_ptr<MemfdSegment> MemfdSegment::map(UniqueFd fd, std::string name, std::size_t limit_bytes) {
  return std::shared_ptr<MemfdSegment>(new MemfdSegment(std::move(fd), std::move(name), limit_bytes));
}

MemfdSegment::MemfdSegment(UniqueFd fd, std::string name, std::size_t limit_bytes)
    : fd_(std::move(fd)), name_(std::move(name)), limit_(round_up_to_page(std::max<std::size_t>(limit_bytes, 1))) {
  void* base = ::mmap(nullptr, limit_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd_.get(), 0);
  if (base == MAP_FAILED)
    throw CommError(cat("[comm.create_segment '", name_, "'] mapping ", mebibytes(limit_), " of address space: ", std::strerror(errno),
                        "; lower the limit or raise `ulimit -v`"));
  base_ = static_cast<std::byte*>(base);
}

MemfdSegment::~MemfdSegment() { ::munmap(base_, limit_); }

std::size_t MemfdSegment::size() const { return std::min(file_size(fd_.get()), limit_); }

void MemfdSegment::reserve(std::size_t bytes) {
  if (bytes <= reserved_.load(std::memory_order_relaxed)) return;
  if (bytes > limit_)
    throw CommError(cat("[comm.segment.reserve '", name_, "'] ", mebibytes(bytes), " wanted, but the segment was created with a limit of ",
                        mebibytes(limit_)));
  std::lock_guard<std::mutex> lock(mutex_);
  if (file_size(fd_.get()) < bytes) extend(round_up_to_page(bytes));
  reserved_.store(bytes, std::memory_order_relaxed);
}

// fallocate and not ftruncate: it never shrinks, so that ranks may grow at the same time, and it fails where a later write would SIGBUS.
// In pieces: a signal makes the kernel undo the piece it interrupts.
void MemfdSegment::extend(std::size_t bytes) {
  constexpr std::size_t kPiece = 64 << 20;
  const std::size_t from = file_size(fd_.get());
  for (std::size_t at = from; at < bytes;) {
    const std::size_t piece = std::min(kPiece, bytes - at);
    if (::fallocate(fd_.get(), 0, static_cast<off_t>(at), static_cast<off_t>(piece)) == 0) {
      at += piece;
    } else if (errno != EINTR) {
      throw CommError(cat("[comm.segment.reserve '", name_, "'] growing shared memory from ", mebibytes(from), " to ", mebibytes(bytes),
                          ": ", std::strerror(errno), "; free memory, or raise the container's memory limit"));
    }
  }
}

}  // namespace unshard::comm
