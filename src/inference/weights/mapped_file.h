#pragma once
// A model file in memory without reading it: pages come from disk as they are touched and are shared between processes.
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace unshard::inference {

/// \throws ModelError "[inference.weights] FILE: WHAT"
[[noreturn]] void fail_file(const std::string& file, const std::string& what);

/// How the bytes are going to be read. Only hints: nothing fails where the system can't follow one.
enum class Access {
  sequential,  ///< once, in order: read far ahead, forget behind
  random,      ///< here and there: read no more than asked for
  soon,        ///< start reading now
  done,        ///< not again: the pages may go (they come back from disk if touched)
};

/// Read only. Whoever truncates the file while it is mapped ends the process by SIGBUS when a lost page is touched; replacing it by rename
/// is safe.
class MappedFile {
 public:
  /// \throws ModelError  not there, not readable, not a plain file, or empty
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::string& path() const { return path_; }
  std::span<const std::byte> bytes() const { return {data_, size_}; }
  /// For the pages that hold `part`, which lies in bytes().
  void advise(std::span<const std::byte> part, Access access) const;
  /// As advise(done), where `data` lies in bytes() at all (a copy of what lay at an odd address doesn't).
  void done_with(const void* data, std::int64_t size) const;

 private:
  std::string path_;
  const std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace unshard::inference
