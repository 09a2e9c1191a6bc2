#include "checkpoint/tensor_file.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "checkpoint/crc32c.h"
#include "checkpoint/json_reader.h"
#include "checkpoint/system_file.h"
#include "unshard/core/error.h"

namespace unshard::checkpoint {
namespace {

using Json = nlohmann::json;

constexpr std::pair<c10::ScalarType, const char*> kTypes[] = {{c10::ScalarType::Float, "F32"},
                                                              {c10::ScalarType::BFloat16, "BF16"},
                                                              {c10::ScalarType::Half, "F16"},
                                                              {c10::ScalarType::Double, "F64"},
                                                              {c10::ScalarType::Long, "I64"},
                                                              {c10::ScalarType::Int, "I32"},
                                                              {c10::ScalarType::Short, "I16"},
                                                              {c10::ScalarType::Char, "I8"},
                                                              {c10::ScalarType::Byte, "U8"},
                                                              {c10::ScalarType::Bool, "BOOL"},
                                                              {c10::ScalarType::Float8_e4m3fn, "F8_E4M3"},
                                                              {c10::ScalarType::Float8_e5m2, "F8_E5M2"}};
constexpr std::int64_t kMostHeaderBytes = 1 << 30;
constexpr std::size_t kAlignment = 4096;  // of the values' begin, so that they can be read directly

std::string type_name(const std::string& path, c10::ScalarType dtype) {
  for (const auto& [type, name] : kTypes) {
    if (type == dtype) return name;
  }
  fail(path, cat("dtype ", dtype, " can't be stored"));
}

std::string make_header(const std::string& path, const NamedTensors& tensors, const std::map<std::string, std::string>& metadata,
                        std::int64_t& value_bytes) {
  Json header = Json::object();
  header["__metadata__"] = metadata;
  value_bytes = 0;
  for (const auto& [name, tensor] : tensors) {
    const auto bytes = static_cast<std::int64_t>(tensor.nbytes());
    if (header.contains(name)) fail(path, cat("two tensors are named ", name));
    header[name] = {{"dtype", type_name(path, tensor.scalar_type())},
                    {"shape", tensor.sizes().vec()},
                    {"data_offsets", {value_bytes, value_bytes + bytes}}};
    value_bytes += bytes;
  }
  std::string text = header.dump();
  constexpr auto kLength = sizeof(std::uint64_t);
  text.resize((text.size() + kLength + kAlignment - 1) / kAlignment * kAlignment - kLength, ' ');
  return text;
}

}  // namespace

WrittenFile write_tensor_file(const std::string& path, const NamedTensors& tensors, const std::map<std::string, std::string>& metadata,
                              const TensorFileOptions& options) {
  std::int64_t value_bytes = 0;
  const auto header = make_header(path, tensors, metadata, value_bytes);
  const auto length = static_cast<std::uint64_t>(header.size());
  WrittenFile result;
  DirectWriter writer(path, static_cast<std::int64_t>(sizeof(length) + length) + value_bytes, options.writer);
  const auto append = [&](const void* data, std::size_t size) {
    writer.append(data, size);
    if (options.checksum_whole) result.crc32c = crc32c(result.crc32c, data, size);
  };
  append(&length, sizeof(length));
  append(header.data(), header.size());
  for (const auto& [name, tensor] : tensors) {
    const auto here = tensor.device().is_cpu() ? tensor.contiguous() : tensor.to(c10::kCPU).contiguous();
    append(here.const_data_ptr(), here.nbytes());
    result.parts[name] = crc32c(0, here.const_data_ptr(), here.nbytes());
  }
  result.bytes = writer.finish();
  return result;
}

std::int64_t TensorFile::Entry::numel() const { return (end - begin) / static_cast<std::int64_t>(c10::elementSize(dtype)); }

TensorFile::TensorFile(std::string path) : path_(std::move(path)) { read_header(); }

void TensorFile::read_header() {
  const auto file = open_to_read(path_);
  bytes_ = file_bytes(file, path_);
  std::uint64_t length = 0;
  if (bytes_ < static_cast<std::int64_t>(sizeof(length))) fail(path_, cat("has ", bytes_, " bytes: cut short, or no tensor file"));
  read_exactly(file, path_, &length, sizeof(length), 0);
  if (length > static_cast<std::uint64_t>(std::min(bytes_ - 8, kMostHeaderBytes)))
    fail(path_, cat("its header would have ", length, " bytes of the file's ", bytes_, ": cut short, or no tensor file"));
  std::string text(length, '\0');
  read_exactly(file, path_, text.data(), text.size(), sizeof(length));
  const auto document = parse_json(text, path_);
  const auto base = static_cast<std::int64_t>(sizeof(length) + length);
  for (const auto& [name, value] : JsonReader(document, path_).members()) {
    if (name == "__metadata__") {
      for (const auto& [key, item] : value.members()) metadata_[key] = item.text();
      continue;
    }
    Entry entry;
    const auto dtype = value.at("dtype").text();
    const auto* const type = std::find_if(std::begin(kTypes), std::end(kTypes), [&](const auto& known) { return dtype == known.second; });
    if (type == std::end(kTypes)) value.at("dtype").fail(cat("'", dtype, "' is unknown"));
    entry.dtype = type->first;
    entry.sizes = value.at("shape").sizes();
    const auto offsets = value.at("data_offsets").sizes();
    const auto bytes = checked_numel(entry.sizes, static_cast<std::int64_t>(c10::elementSize(entry.dtype)));
    if (offsets.size() != 2 || !bytes || offsets[1] < offsets[0] || offsets[1] - offsets[0] != *bytes || offsets[1] > bytes_ - base) {
      value.at("data_offsets")
          .fail(cat(at::IntArrayRef(offsets), " don't fit shape ", at::IntArrayRef(entry.sizes), " of ", dtype, " in a file of ", bytes_,
                    " bytes: damaged or cut short"));
    }
    entry.begin = base + offsets[0];
    entry.end = base + offsets[1];
    entries_.emplace(name, std::move(entry));
  }
}

const TensorFile::Entry& TensorFile::entry(const std::string& name) const {
  const auto at = entries_.find(name);
  if (at == entries_.end()) fail(path_, cat("has no tensor '", name, "'"));
  return at->second;
}

at::Tensor TensorFile::read(const std::string& name) const {
  const auto& found = entry(name);
  auto tensor = at::empty(found.sizes, at::TensorOptions().dtype(found.dtype));
  read_elements(name, 0, found.numel(), tensor.mutable_data_ptr());
  return tensor;
}

void TensorFile::read_elements(const std::string& name, std::int64_t begin, std::int64_t end, void* out) const {
  const auto& found = entry(name);
  UNSHARD_DCHECK(0 <= begin && begin <= end && end <= found.numel(), "[", begin, ", ", end, ") of ", name);
  const auto width = static_cast<std::int64_t>(c10::elementSize(found.dtype));
  if (begin == end) return;
  const auto file = open_to_read(path_);
  read_exactly(file, path_, out, static_cast<std::size_t>((end - begin) * width), found.begin + begin * width);
}

}  // namespace unshard::checkpoint
