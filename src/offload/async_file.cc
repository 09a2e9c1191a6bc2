#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>

#include "offload/held_file.h"
#include "unshard/core/error.h"

namespace unshard::offload {

std::string reason_of(const std::string& path, int code) {
  struct statvfs info {};
  const bool full = code == ENOSPC || code == EDQUOT;
  if (!full || ::statvfs(path.c_str(), &info) != 0) return std::strerror(code);
  return cat(std::strerror(code), " (", (static_cast<std::uint64_t>(info.f_bavail) * info.f_frsize) >> 20, " MB are free there)");
}

FileError file_error(const std::string& path, const std::string& what, int code) {
  return {cat("[offload] ", path, ": ", what, code != 0 ? ": " : "", code != 0 ? reason_of(path, code) : ""), code};
}

void fail_file(const std::string& path, const std::string& what, int code) { throw file_error(path, what, code); }

AsyncFile::Held::~Held() {
  for (const int fd : {cached, direct})
    if (fd >= 0) ::close(fd);
}

AsyncFile::AsyncFile(const std::string& path, Access access, bool direct) : held_(std::make_shared<Held>()) {
  held_->path = path;
  held_->writable = access == Access::write;
  const int flags =
      (held_->writable ? O_RDWR | O_CREAT : O_RDONLY) | O_CLOEXEC | O_NONBLOCK;  // a named pipe must not wait for its other end
  held_->cached = ::open(path.c_str(), flags, 0644);
  if (held_->cached < 0) fail_file(path, "can't be opened", errno);
  struct stat status {};
  if (::fstat(held_->cached, &status) != 0) fail_file(path, "can't be looked at", errno);
  if (S_ISDIR(status.st_mode) || S_ISFIFO(status.st_mode)) fail_file(path, "is a folder or a pipe; a file is wanted", 0);
  // io_uring takes the flag for a wish to get EAGAIN rather than to wait for the disk.
  if (::fcntl(held_->cached, F_SETFL, flags & ~(O_NONBLOCK | O_CREAT)) != 0) fail_file(path, "can't be set up", errno);
  if (!direct) return;
  held_->direct = ::open(path.c_str(), (flags & ~(O_CREAT | O_NONBLOCK)) | O_DIRECT);
  if (held_->direct < 0) held_->direct_refused_by = errno;
}

const AsyncFile::Held& AsyncFile::opened() const {
  require(held_ != nullptr, "[offload] the file is closed");
  return *held_;
}

const std::string& AsyncFile::path() const { return opened().path; }

std::int64_t AsyncFile::bytes() const {
  struct stat status {};
  if (::fstat(opened().cached, &status) != 0) fail_file(path(), "can't be looked at", errno);
  return status.st_size;
}

void AsyncFile::reserve(std::int64_t bytes) const {
  if (bytes <= 0 || ::fallocate(opened().cached, FALLOC_FL_KEEP_SIZE, 0, bytes) == 0) return;
  if (errno != EOPNOTSUPP && errno != ENOSYS && errno != EINVAL && errno != EINTR)
    fail_file(path(), cat("can't set aside ", bytes, " bytes"), errno);
}

void AsyncFile::resize(std::int64_t bytes) const {
  if (::ftruncate(opened().cached, bytes) != 0) fail_file(path(), cat("can't be made ", bytes, " bytes long"), errno);
}

void AsyncFile::sync() const {
  if (::fsync(opened().cached) != 0) fail_file(path(), "can't be brought to the disk", errno);
}

std::string AsyncFile::describe() const {
  if (opened().takes_direct()) return "past the page cache";
  if (held_->direct_refused_by != 0) return cat("through the page cache (O_DIRECT: ", std::strerror(held_->direct_refused_by), ")");
  return held_->transfer_refused ? "through the page cache (its file system takes no direct transfers)" : "through the page cache";
}

AlignedBuffer::AlignedBuffer(std::int64_t bytes) : bytes_(bytes) {
  require(bytes >= 0, "[offload] a buffer of ", bytes, " bytes");
  constexpr std::int64_t kHugePage = std::int64_t{2} << 20;
  const std::int64_t unit = bytes >= kHugePage ? kHugePage : kBlock;
  const auto size = static_cast<std::size_t>((std::max<std::int64_t>(bytes, 1) + kBlock - 1) / kBlock * kBlock);
  void* memory = nullptr;
  if (::posix_memalign(&memory, static_cast<std::size_t>(unit), size) != 0) throw std::bad_alloc();
  data_.reset(static_cast<std::byte*>(memory));
  // Only a wish: fewer address translations for who computes with it, and fewer pages for the system to pin at each transfer.
  if (bytes >= kHugePage) static_cast<void>(::madvise(memory, size, MADV_HUGEPAGE));
}

void AlignedBuffer::Free::operator()(std::byte* p) const { std::free(p); }

}  // namespace unshard::offload
