#pragma once
// Where a training state is read from: our own folders at any world size, or whatever else implements this (Python's readers of
// DeepSpeed's).
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "unshard/checkpoint/contents.h"

namespace at {
class Tensor;
}

namespace unshard::checkpoint {

/// Elements [begin, end) of one kind of value of one parameter, counted in its flattened (row-major) value.
struct Range {
  std::string kind, name;
  std::int64_t begin = 0, end = 0;
};

/// Used by one thread at a time. All errors are CheckpointError and name the file.
class Source {
 public:
  virtual ~Source() = default;
  virtual const Contents& contents() const = 0;
  /// Flat CPU tensor of end - begin elements, in the dtype that is stored.
  virtual at::Tensor read(const Range& range) = 0;
  /// The same into `out`, flat and contiguous on the CPU, of any floating-point dtype.
  virtual void read_into(const Range& range, at::Tensor& out);
  /// The files that hold these are here and are what they should be, as far as can be told without reading the values.
  virtual void check(const std::vector<Range>& ranges) {}
  /// Checksums of part `part` of `parts` of all that is stored (without the optimizer's, if so asked).
  virtual void verify(int part, int parts, bool with_optimizer) {}
};

/// A folder of our own format: manifest.json and safetensors files, written by any number of ranks.
/// \throws CheckpointError naming file and reason: damaged, cut short, foreign, of a later format.
std::unique_ptr<Source> open(const std::string& directory);

/// Read everything a folder holds and compare checksums. \throws CheckpointError naming the first thing that is wrong.
void verify(const std::string& directory);

/// The tag that `save_dir`/latest names; empty: there is none.
std::string latest_tag(const std::string& save_dir);

}  // namespace unshard::checkpoint
