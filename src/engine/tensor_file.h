#pragma once
// Named tensors and text in one file, in the safetensors format: 8 bytes of header length, a JSON header, raw little-endian values.
#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

namespace unshard {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

/// Write `path` completely and sync it to the disk. Tensors may rest on any device; they are copied one at a time.
/// \throws CheckpointError naming the file and the system's reason.
void write_tensor_file(const std::string& path, const NamedTensors& tensors, const std::map<std::string, std::string>& metadata);

/// An open file: the header is read and checked, values are read when asked for.
class TensorFile {
 public:
  /// \throws CheckpointError not a whole file of this format.
  explicit TensorFile(std::string path);
  ~TensorFile();
  TensorFile(const TensorFile&) = delete;
  TensorFile& operator=(const TensorFile&) = delete;

  struct Entry {
    c10::ScalarType dtype{};
    std::vector<std::int64_t> sizes;
    std::int64_t begin = 0, end = 0;  ///< in the file
  };
  const std::map<std::string, Entry>& entries() const { return entries_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  /// \throws CheckpointError no such entry, or the file can't be read.
  at::Tensor read(const std::string& name) const;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  int descriptor_ = -1;
  std::map<std::string, Entry> entries_;
  std::map<std::string, std::string> metadata_;
};

/// fsync a file or folder. \throws CheckpointError.
void sync_path(const std::string& path);

}  // namespace unshard
