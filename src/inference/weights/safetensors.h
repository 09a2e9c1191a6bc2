#pragma once
// Hugging Face's safetensors: eight bytes with the header's length, a JSON header, then the tensors' bytes without gaps.
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "inference/weights/mapped_file.h"
#include "inference/weights/weight_source.h"

namespace unshard::inference {

/// One file. The whole header is checked on opening: sizes against shapes and types, no gap, no overlap, no byte beyond the file.
class SafetensorsFile : public WeightSource {
 public:
  /// \throws ModelError naming file, tensor and reason
  explicit SafetensorsFile(const std::string& path);
  explicit SafetensorsFile(std::unique_ptr<MappedFile> file);
  ~SafetensorsFile() override;
  const MappedFile& file() const { return *file_; }
  void done_with(const WeightView& view) const override;

 private:
  friend class SafetensorsFolder;
  void read_header();
  void add_tensor(const std::string& name, Entry entry, std::span<const std::byte> bytes);
  std::unique_ptr<MappedFile> file_;
  std::vector<std::unique_ptr<std::byte[]>> aligned_;  ///< copies of tensors that old writers put at odd addresses
};

/// model.safetensors, or model.safetensors.index.json with the files that it names.
class SafetensorsFolder : public WeightSource {
 public:
  /// \throws ModelError  also where a listed file or a listed tensor is missing
  explicit SafetensorsFolder(const std::string& folder);
  ~SafetensorsFolder() override;
  void done_with(const WeightView& view) const override;

 private:
  void read_index(const std::string& index_path);
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
};

}  // namespace unshard::inference
