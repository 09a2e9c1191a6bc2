#include "inference/weights/weight_source.h"

#include <sys/stat.h>

#include <cstring>

#include "inference/weights/gguf.h"
#include "inference/weights/mapped_file.h"
#include "inference/weights/safetensors.h"
#include "unshard/core/error.h"

namespace unshard::inference {

void WeightSource::add(const std::string& name, Entry entry) {
  entry.view.name = name;
  const std::string file = entry.file;
  if (!entries_.emplace(name, std::move(entry)).second) fail_file(file, cat("tensor '", name, "' comes twice: damaged or foreign"));
}

const WeightSource::Entry& WeightSource::entry(const std::string& name) const {
  const auto at = entries_.find(name);
  if (at == entries_.end()) fail_file(path_, cat("has no tensor '", name, "'; is it this model's file, and complete?"));
  return at->second;
}

const WeightView* WeightSource::find(const std::string& name) const {
  const auto at = entries_.find(name);
  if (at == entries_.end()) return nullptr;
  const Entry& found = at->second;
  if (!found.unusable.empty()) fail_file(found.file, cat("tensor '", name, "' is of type ", found.unusable, ", which weights can't be"));
  return &found.view;
}

WeightView WeightSource::get(const std::string& name) const {
  entry(name);
  return *find(name);
}

const std::vector<std::int64_t>& WeightSource::shape(const std::string& name) const { return entry(name).shape; }

std::vector<std::string> WeightSource::names() const {
  std::vector<std::string> all;
  all.reserve(entries_.size());
  for (const auto& [name, entry] : entries_) all.push_back(name);
  return all;
}

std::unique_ptr<WeightSource> open_weights(const std::string& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode)) return std::make_unique<SafetensorsFolder>(path);
  auto file = std::make_unique<MappedFile>(path);
  const auto bytes = file->bytes();
  const bool gguf = bytes.size() >= 4 && std::memcmp(bytes.data(), "GGUF", 4) == 0;
  if (gguf) return std::make_unique<GgufFile>(std::move(file));
  return std::make_unique<SafetensorsFile>(std::move(file));
}

std::int64_t checked_product(const std::vector<std::int64_t>& sizes, std::int64_t width) {
  std::int64_t product = width;
  bool empty = false;
  for (const std::int64_t size : sizes) {
    if (size < 0) return -1;
    empty = empty || size == 0;
    if (size > 0 && __builtin_mul_overflow(product, size, &product)) return -1;
  }
  return empty ? 0 : product;
}

void set_rows(WeightView& view, const std::vector<std::int64_t>& shape) {
  view.cols = shape.empty() ? 1 : shape.back();
  view.rows = 1;
  for (std::size_t i = 0; i + 1 < shape.size(); ++i) view.rows *= shape[i];
}

}  // namespace unshard::inference
