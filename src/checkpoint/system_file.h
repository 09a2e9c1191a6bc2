#pragma once
// Files of the system: every failure is a CheckpointError that names the file and the system's reason.
#include <cstddef>
#include <cstdint>
#include <string>

namespace unshard::checkpoint {

[[noreturn]] void fail(const std::string& path, const std::string& what);
/// With errno's text.
[[noreturn]] void fail_system(const std::string& path, const std::string& what);

/// Closes what it holds.
class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  ~Descriptor();
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  Descriptor(Descriptor&& other) noexcept : fd_(other.release()) {}
  Descriptor& operator=(Descriptor&& other) noexcept;
  int get() const { return fd_; }
  int release();

 private:
  int fd_;
};

Descriptor open_to_read(const std::string& path);
std::int64_t file_bytes(const Descriptor& file, const std::string& path);
/// Exactly `size` bytes at `offset`.
void read_exactly(const Descriptor& file, const std::string& path, void* data, std::size_t size, std::int64_t offset);
/// A whole small file. Larger than `most_bytes` is an error.
std::string read_text(const std::string& path, std::int64_t most_bytes);
/// Replace `path` by a file of this text at once: temporary name, fsync, rename.
void write_text(const std::string& path, const std::string& text);
/// fsync a file or folder.
void sync_path(const std::string& path);

}  // namespace unshard::checkpoint
