#pragma once
// A matrix or vector of a model file, where it lies in the mapped file.
#include <cstdint>
#include <string>
#include <vector>

namespace unshard::inference {

/// How a file holds values. q*: GGUF's blocks along a row (32 values; K kinds 256), see weights/gguf_blocks.h.
enum class FileType { f32, f16, bf16, q4_0, q4_1, q5_0, q5_1, q8_0, q2_k, q3_k, q4_k, q5_k, q6_k };

const char* file_type_name(FileType type);
std::int64_t block_values(FileType type);  ///< values a block: 1 for f32, f16, bf16
std::int64_t block_bytes(FileType type);

/// Row-major [rows, cols]; a vector is [1, cols]. The file stays mapped while its owner lives.
struct WeightView {
  FileType type = FileType::f32;
  const void* data = nullptr;
  std::int64_t rows = 0, cols = 0;
  std::string name;  ///< for messages
  std::int64_t row_bytes() const { return cols / block_values(type) * block_bytes(type); }
  const void* row(std::int64_t r) const { return static_cast<const char*>(data) + r * row_bytes(); }
};

/// Row `r` as float, [cols]. Exact for every type but for the last bit of K kinds (scale times scale in float).
void expand_row(const WeightView& view, std::int64_t r, float* out);

}  // namespace unshard::inference
