#pragma once
// GGUF (llama.cpp's file), versions 2 and 3: key-value metadata, tensor descriptions, then the tensors' bytes, each aligned.
#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "inference/weights/mapped_file.h"
#include "inference/weights/weight_source.h"

namespace unshard::inference {

/// The whole description is checked on opening: every count, length and offset against the file, so that a damaged one gives an error and
/// can't ask for more memory than a small multiple of its own size.
class GgufFile : public WeightSource {
 public:
  /// \throws ModelError naming file, place and reason
  explicit GgufFile(const std::string& path);
  explicit GgufFile(std::unique_ptr<MappedFile> file);
  ~GgufFile() override;
  const MappedFile& file() const { return *file_; }
  void done_with(const WeightView& view) const override;

  /// All metadata: an object by key ("general.architecture"); arrays as lists. Texts are as the file has them, UTF-8 or not.
  const nlohmann::json& metadata() const { return *metadata_; }
  /// One value. Nothing: no such key. \throws ModelError  it is of another kind
  std::optional<std::int64_t> find_integer(const std::string& key) const;
  std::optional<double> find_number(const std::string& key) const;
  std::optional<std::string> find_text(const std::string& key) const;
  std::optional<bool> find_boolean(const std::string& key) const;
  /// As find_*(). \throws ModelError  also where there is no such key
  std::int64_t integer(const std::string& key) const;
  double number(const std::string& key) const;
  std::string text(const std::string& key) const;

 private:
  void read();
  const nlohmann::json* value(const std::string& key) const;
  [[noreturn]] void wrong_kind(const std::string& key, const char* wanted) const;
  std::unique_ptr<MappedFile> file_;
  std::unique_ptr<nlohmann::json> metadata_;
};

}  // namespace unshard::inference
