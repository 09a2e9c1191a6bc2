#pragma once
// Our own folders as a Source: any range of any value, whatever ranks wrote it.
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/manifest.h"
#include "checkpoint/tensor_file.h"
#include "unshard/checkpoint/source.h"

namespace unshard::checkpoint {

class NativeSource final : public Source {
 public:
  explicit NativeSource(std::string directory);
  const Contents& contents() const override { return manifest_.contents; }
  const Manifest& manifest() const { return manifest_; }
  at::Tensor read(const Range& range) override;
  void read_into(const Range& range, at::Tensor& out) override;
  void check(const std::vector<Range>& ranges) override;
  void verify(int part, int parts, bool with_optimizer) override;

 private:
  struct Part {
    std::string file, key;
    const Piece* piece;
  };
  /// Bytes of a file that have a checksum.
  struct Checked {
    const std::string* file;
    const std::string* key;  ///< null: the whole file
    std::int64_t begin, end;
    std::uint32_t said;
  };
  using Value = std::pair<std::string, std::string>;  // kind, name
  const std::vector<Part>& parts_of(const Range& range) const;
  const TensorFile& file(const std::string& name);
  std::vector<Checked> checksums(bool with_optimizer);
  c10::ScalarType dtype_of(const Range& range);
  void read_parts(const Range& range, c10::ScalarType dtype, void* out);

  const std::string directory_;
  Manifest manifest_;
  std::map<Value, std::vector<Part>> parts_;                  // in order of their elements
  std::map<std::string, std::unique_ptr<TensorFile>> files_;  // headers read so far
};

}  // namespace unshard::checkpoint
