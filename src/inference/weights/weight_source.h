#pragma once
// The tensors of a model, by name, whatever kind of file they lie in.
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "inference/weights/weight_view.h"

namespace unshard::inference {

/// Nothing changes after construction: any number of threads may ask. Views stay valid while the source lives.
class WeightSource {
 public:
  virtual ~WeightSource() = default;
  WeightSource(const WeightSource&) = delete;
  WeightSource& operator=(const WeightSource&) = delete;

  /// File or folder, for messages.
  const std::string& path() const { return path_; }
  /// Null: there is no such tensor. A tensor of more than two dims has the product of all but the last as rows; a scalar is [1, 1].
  /// \throws ModelError  it is there, but of a type that can't be used (integers, fp8, GGUF's rarer kinds)
  const WeightView* find(const std::string& name) const;
  /// \throws ModelError  naming file and tensor, where there is none
  WeightView get(const std::string& name) const;
  /// As the file has it, last dim contiguous (GGUF's dims reversed). Also for types that can't be used. \throws ModelError as get()
  const std::vector<std::int64_t>& shape(const std::string& name) const;
  /// All, sorted.
  std::vector<std::string> names() const;
  /// The view's pages may leave this process's memory; they come back from the file when touched. A hint.
  virtual void done_with(const WeightView& view) const {}

 protected:
  struct Entry {
    WeightView view;
    std::vector<std::int64_t> shape;
    std::string unusable;  ///< the type's name, where it is none of FileType
    std::string file;
  };
  explicit WeightSource(std::string path) : path_(std::move(path)) {}
  /// \throws ModelError  the name is there already
  void add(const std::string& name, Entry entry);
  const Entry& entry(const std::string& name) const;

 private:
  std::string path_;
  std::map<std::string, Entry> entries_;
};

/// A folder with model.safetensors or model.safetensors.index.json, a .safetensors file, or a GGUF file (known by its first bytes).
/// Cost: reads headers only. \throws ModelError
std::unique_ptr<WeightSource> open_weights(const std::string& path);

/// Product of `sizes` times `width`, or -1: a negative size, or a product beyond int64.
std::int64_t checked_product(const std::vector<std::int64_t>& sizes, std::int64_t width = 1);
/// view.rows and view.cols of a tensor of this shape, whose product checked_product() has found good.
void set_rows(WeightView& view, const std::vector<std::int64_t>& shape);

}  // namespace unshard::inference
