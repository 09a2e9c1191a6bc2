#include "checkpoint/direct_writer.h"

#include <fcntl.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "unshard/core/error.h"

namespace unshard::checkpoint {
namespace {

constexpr std::size_t kBlock = 4096;  // no disk asks for coarser alignment than a page

std::string no_space(const std::string& path, std::int64_t wanted) {
  struct statvfs info {};
  const auto folder = path.substr(0, path.find_last_of('/'));
  if (::statvfs(folder.c_str(), &info) != 0) return cat("no space for its ", wanted, " bytes");
  return cat("no space for its ", wanted, " bytes: ", static_cast<std::uint64_t>(info.f_bavail) * info.f_frsize, " are free");
}

}  // namespace

DirectWriter::DirectWriter(std::string path, std::int64_t expected_bytes, const WriterOptions& options)
    : path_(std::move(path)), options_(options), memory_(nullptr, &std::free) {
  UNSHARD_DCHECK(options_.buffer_bytes >= kBlock && options_.buffer_bytes % kBlock == 0, "buffer of ", options_.buffer_bytes);
  constexpr int kFlags = O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC;
  if (options_.direct) {
    file_ = Descriptor(::open(path_.c_str(), kFlags | O_DIRECT, 0644));
    direct_ = file_.get() >= 0;
  }
  if (!direct_) file_ = Descriptor(::open(path_.c_str(), kFlags, 0644));
  if (file_.get() < 0) fail_system(path_, "can't create");
  reserve(expected_bytes);
  memory_.reset(static_cast<std::byte*>(std::aligned_alloc(kBlock, 2 * options_.buffer_bytes)));
  if (!memory_) fail(path_, cat("no memory for two buffers of ", options_.buffer_bytes, " bytes"));
  buffers_[0].data = memory_.get();
  buffers_[1].data = memory_.get() + options_.buffer_bytes;
}

DirectWriter::~DirectWriter() { stop(); }

void DirectWriter::reserve(std::int64_t bytes) {
  if (bytes <= 0 || ::fallocate(file_.get(), FALLOC_FL_KEEP_SIZE, 0, bytes) == 0) return;
  if (errno == ENOSPC || errno == EDQUOT) fail(path_, no_space(path_, bytes));
  if (errno != EOPNOTSUPP && errno != ENOSYS && errno != EINVAL && errno != EINTR) fail_system(path_, "can't set aside its space");
}

void DirectWriter::append(const void* data, std::size_t size) {
  const auto* bytes = static_cast<const std::byte*>(data);
  while (size > 0) {
    auto& buffer = buffers_[filling_];
    const auto part = std::min(size, options_.buffer_bytes - buffer.filled);
    std::memcpy(buffer.data + buffer.filled, bytes, part);
    buffer.filled += part;
    bytes += part;
    size -= part;
    if (buffer.filled == options_.buffer_bytes) submit();
  }
}

void DirectWriter::submit() {
  std::unique_lock lock(mutex_);
  if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
  changed_.wait(lock, [this] { return pending_ < 0; });
  if (error_) std::rethrow_exception(error_);
  pending_ = filling_;
  filling_ = 1 - filling_;
  buffers_[filling_].filled = 0;
  changed_.notify_all();
}

void DirectWriter::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return pending_ >= 0 || ending_; });
    if (pending_ < 0) return;
    const auto& buffer = buffers_[pending_];
    lock.unlock();
    std::exception_ptr error;
    try {
      write_out(buffer.data, buffer.filled);
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    error_ = error;
    pending_ = -1;
    changed_.notify_all();
    if (error) return;
  }
}

// What is left over from a short write is no longer aligned: it goes through the page cache, and so does what follows.
void DirectWriter::leave_direct() {
  const int flags = ::fcntl(file_.get(), F_GETFL);
  if (flags < 0 || ::fcntl(file_.get(), F_SETFL, flags & ~O_DIRECT) != 0) fail_system(path_, "can't leave direct writing");
  direct_ = false;
}

void DirectWriter::write_out(const std::byte* data, std::size_t size) {
  const auto begin = written_;
  while (size > 0) {
    if (direct_ && (size % kBlock != 0 || written_ % static_cast<std::int64_t>(kBlock) != 0)) leave_direct();
    const auto got = ::pwrite(file_.get(), data, size, written_);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EINVAL && direct_) {  // a file system that takes the flag but no such write
      leave_direct();
      continue;
    }
    if (got < 0 && (errno == ENOSPC || errno == EDQUOT)) fail(path_, no_space(path_, written_ + static_cast<std::int64_t>(size)));
    if (got < 0) fail_system(path_, "can't write");
    if (got == 0) fail(path_, cat("the system wrote nothing at byte ", written_));
    data += got;
    written_ += got;
    size -= static_cast<std::size_t>(got);
  }
  // Writing back begins now, not all at once in fsync.
  if (!direct_) (void)::sync_file_range(file_.get(), begin, written_ - begin, SYNC_FILE_RANGE_WRITE);
}

void DirectWriter::stop() {
  {
    std::lock_guard lock(mutex_);
    ending_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

std::int64_t DirectWriter::finish() {
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return pending_ < 0; });
  }
  stop();
  if (error_) std::rethrow_exception(error_);
  // The end of the file: whole blocks directly, the rest through the page cache.
  const auto& last = buffers_[filling_];
  const auto blocks = last.filled / kBlock * kBlock;
  write_out(last.data, blocks);
  write_out(last.data + blocks, last.filled - blocks);
  if (::ftruncate(file_.get(), written_) != 0) fail_system(path_, "can't set its size");  // frees what was set aside beyond it
  if (::fsync(file_.get()) != 0) fail_system(path_, "can't sync");
  const Descriptor done(file_.release());
  return written_;
}

}  // namespace unshard::checkpoint
