#include "checkpoint/system_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "unshard/core/error.h"

namespace unshard::checkpoint {

void fail(const std::string& path, const std::string& what) { throw CheckpointError(cat("[checkpoint] ", path, ": ", what)); }
void fail_system(const std::string& path, const std::string& what) { fail(path, cat(what, ": ", std::strerror(errno))); }

Descriptor::~Descriptor() {
  if (fd_ >= 0) ::close(fd_);
}

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  if (this != &other) {
    if (fd_ >= 0) ::close(fd_);
    fd_ = other.release();
  }
  return *this;
}

int Descriptor::release() { return std::exchange(fd_, -1); }

Descriptor open_to_read(const std::string& path) {
  Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (file.get() < 0) fail_system(path, "can't open");
  return file;
}

std::int64_t file_bytes(const Descriptor& file, const std::string& path) {
  struct stat info {};
  if (::fstat(file.get(), &info) != 0) fail_system(path, "can't stat");
  if (!S_ISREG(info.st_mode)) fail(path, "is no regular file");
  return info.st_size;
}

void read_exactly(const Descriptor& file, const std::string& path, void* data, std::size_t size, std::int64_t offset) {
  auto* bytes = static_cast<char*>(data);
  while (size > 0) {
    const auto got = ::pread(file.get(), bytes, size, offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail_system(path, "can't read");
    if (got == 0) fail(path, "the file is cut short");
    bytes += got;
    offset += got;
    size -= static_cast<std::size_t>(got);
  }
}

std::string read_text(const std::string& path, std::int64_t most_bytes) {
  const auto file = open_to_read(path);
  const auto bytes = file_bytes(file, path);
  if (bytes > most_bytes) fail(path, cat("has ", bytes, " bytes, more than the ", most_bytes, " such a file may have"));
  std::string text(static_cast<std::size_t>(bytes), '\0');
  read_exactly(file, path, text.data(), text.size(), 0);
  return text;
}

void write_text(const std::string& path, const std::string& text) {
  const auto temporary = path + ".tmp";
  {
    const Descriptor file(::open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
    if (file.get() < 0) fail_system(temporary, "can't create");
    std::size_t done = 0;
    while (done < text.size()) {
      const auto written = ::write(file.get(), text.data() + done, text.size() - done);
      if (written < 0 && errno == EINTR) continue;
      if (written <= 0) fail_system(temporary, "can't write");
      done += static_cast<std::size_t>(written);
    }
    if (::fsync(file.get()) != 0) fail_system(temporary, "can't sync");
  }
  if (std::rename(temporary.c_str(), path.c_str()) != 0) fail_system(path, cat("can't rename ", temporary, " to it"));
}

void sync_path(const std::string& path) {
  const auto file = open_to_read(path);
  if (::fsync(file.get()) != 0) fail_system(path, "can't sync");
}

}  // namespace unshard::checkpoint
