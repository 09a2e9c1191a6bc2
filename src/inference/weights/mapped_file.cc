#include "inference/weights/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <functional>

#include "unshard/core/error.h"
#include "unshard/inference/engine.h"

namespace unshard::inference {
namespace {

int madvise_value(Access access) {
  switch (access) {
    case Access::sequential:
      return MADV_SEQUENTIAL;
    case Access::random:
      return MADV_RANDOM;
    case Access::soon:
      return MADV_WILLNEED;
    case Access::done:
      break;
  }
  return MADV_DONTNEED;
}

struct Descriptor {
  int fd;
  ~Descriptor() {
    if (fd >= 0) ::close(fd);
  }
};

}  // namespace

void fail_file(const std::string& file, const std::string& what) { throw ModelError(cat("[inference.weights] ", file, ": ", what)); }

MappedFile::MappedFile(const std::string& path) : path_(path) {
  const Descriptor file{::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};  // O_NONBLOCK: a named pipe must not wait for a writer
  if (file.fd < 0) fail_file(path, cat("can't be opened: ", std::strerror(errno)));
  struct stat status {};
  if (::fstat(file.fd, &status) != 0) fail_file(path, cat("can't be read: ", std::strerror(errno)));
  if (!S_ISREG(status.st_mode)) fail_file(path, "is not a plain file");
  if (status.st_size <= 0) fail_file(path, "is empty");
  size_ = static_cast<std::size_t>(status.st_size);
  void* data = ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, file.fd, 0);
  if (data == MAP_FAILED) fail_file(path, cat("can't be mapped: ", std::strerror(errno)));
  data_ = static_cast<const std::byte*>(data);
}

MappedFile::~MappedFile() { ::munmap(const_cast<std::byte*>(data_), size_); }

void MappedFile::advise(std::span<const std::byte> part, Access access) const {
  if (part.empty()) return;
  const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto address = reinterpret_cast<std::uintptr_t>(part.data());
  const std::uintptr_t begin = address / page * page;
  ::madvise(reinterpret_cast<void*>(begin), address - begin + part.size(), madvise_value(access));
}

void MappedFile::done_with(const void* data, std::int64_t size) const {
  const auto* begin = static_cast<const std::byte*>(data);
  if (std::less_equal<>()(data_, begin) && std::less<>()(begin, data_ + size_))
    advise({begin, static_cast<std::size_t>(size)}, Access::done);
}

}  // namespace unshard::inference
