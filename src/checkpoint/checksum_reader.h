#pragma once
// Checksums of a file's bytes, read through the page cache. Who reads the same bytes next finds them in memory: that is how a load compares
// checksums before it changes anything and still takes each byte from the disk once.
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "checkpoint/system_file.h"

namespace unshard::checkpoint {

/// One open file and one buffer of kBytes, the only memory it needs. Ask in the order of the offsets: then the system reads ahead of what
/// is asked, from the first byte to the last.
class ChecksumReader {
 public:
  /// Small enough to stay in a core's cache between the copy to it and the checksum of it.
  static constexpr std::size_t kBytes = 1 << 20;

  /// \throws CheckpointError the file can't be opened.
  explicit ChecksumReader(std::string path);
  /// CRC-32C of bytes [begin, end). \throws CheckpointError they can't be read.
  std::uint32_t checksum(std::int64_t begin, std::int64_t end);
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  Descriptor file_;
  std::unique_ptr<std::byte[]> buffer_;
};

/// Checksum of a whole file.
std::uint32_t checksum_file(const std::string& path);

}  // namespace unshard::checkpoint
