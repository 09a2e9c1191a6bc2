#pragma once
// Named tensors and text in one file, in the safetensors format: 8 bytes of header length, a JSON header, raw little-endian values.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/direct_writer.h"

namespace unshard::checkpoint {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

struct WrittenFile {
  std::int64_t bytes = 0;
  std::uint32_t crc32c = 0;                    ///< of the whole file, when asked for
  std::map<std::string, std::uint32_t> parts;  ///< checksum of each tensor's bytes
};

struct TensorFileOptions {
  WriterOptions writer;
  bool checksum_whole = false;
};

/// Write `path` completely and sync it to the disk. Tensors may rest on any device; they are copied one at a time.
/// \throws CheckpointError naming the file and the system's reason.
WrittenFile write_tensor_file(const std::string& path, const NamedTensors& tensors, const std::map<std::string, std::string>& metadata,
                              const TensorFileOptions& options = {});

/// A file whose header was read and checked. Values are read when asked for; it is open only meanwhile, so that any number may be held.
class TensorFile {
 public:
  /// \throws CheckpointError not a whole file of this format.
  explicit TensorFile(std::string path);

  struct Entry {
    c10::ScalarType dtype{};
    std::vector<std::int64_t> sizes;
    std::int64_t begin = 0, end = 0;  ///< in the file
    std::int64_t numel() const;
  };
  const std::map<std::string, Entry>& entries() const { return entries_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  std::int64_t bytes() const { return bytes_; }
  const std::string& path() const { return path_; }
  /// \throws CheckpointError no such entry.
  const Entry& entry(const std::string& name) const;
  /// \throws CheckpointError no such entry, or the file can't be read.
  at::Tensor read(const std::string& name) const;
  /// Elements [begin, end) of the flattened value, in its dtype, to `out`.
  void read_elements(const std::string& name, std::int64_t begin, std::int64_t end, void* out) const;

 private:
  void read_header();
  std::string path_;
  std::int64_t bytes_ = 0;
  std::map<std::string, Entry> entries_;
  std::map<std::string, std::string> metadata_;
};

}  // namespace unshard::checkpoint
