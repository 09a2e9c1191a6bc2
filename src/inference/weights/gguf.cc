#include "inference/weights/gguf.h"

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "inference/weights/gguf_cursor.h"
#include "unshard/core/error.h"

namespace unshard::inference {
namespace {

constexpr std::uint64_t kLeastAlignment = 8, kMostAlignment = std::uint64_t{1} << 30;
constexpr std::uint32_t kMostDims = 4;

/// GGML's numbers of tensor types. \return false: none of FileType
bool file_type_of(std::uint32_t ggml, FileType& type) {
  constexpr std::pair<std::uint32_t, FileType> kTypes[] = {
      {0, FileType::f32},   {1, FileType::f16},   {2, FileType::q4_0},  {3, FileType::q4_1},  {6, FileType::q5_0},
      {7, FileType::q5_1},  {8, FileType::q8_0},  {10, FileType::q2_k}, {11, FileType::q3_k}, {12, FileType::q4_k},
      {13, FileType::q5_k}, {14, FileType::q6_k}, {30, FileType::bf16},
  };
  const auto* at = std::find_if(std::begin(kTypes), std::end(kTypes), [&](const auto& pair) { return pair.first == ggml; });
  if (at == std::end(kTypes)) return false;
  type = at->second;
  return true;
}

struct Tensor {
  std::string name;
  std::vector<std::int64_t> shape;
  std::uint32_t ggml_type = 0;
  std::uint64_t offset = 0;  // from the start of the data
};

void check_version(GgufCursor& cursor) {
  if (cursor.take<std::uint32_t>("the magic number") != 0x46554747) cursor.fail("doesn't begin with \"GGUF\"");
  const auto version = cursor.take<std::uint32_t>("the version");
  if (version == 0x02000000 || version == 0x03000000) cursor.fail("is big-endian, which this reader can't use");
  if (version != 2 && version != 3) cursor.fail(cat("is GGUF version ", version, "; 2 and 3 can be read"));
}

nlohmann::json read_metadata(GgufCursor& cursor, std::uint64_t count) {
  auto metadata = nlohmann::json::object();
  for (std::uint64_t i = 0; i < count; ++i) {
    const std::string key = cursor.text("a key");
    if (metadata.contains(key)) cursor.fail(cat("key '", key, "' comes twice: damaged"));
    metadata[key] = cursor.value(key);
  }
  return metadata;
}

std::vector<Tensor> read_tensors(GgufCursor& cursor, std::uint64_t count) {
  std::vector<Tensor> tensors;
  tensors.reserve(count);
  for (std::uint64_t i = 0; i < count; ++i) {
    Tensor tensor{.name = cursor.text("a tensor's name"), .shape = {}};
    const auto dims = cursor.take<std::uint32_t>("a tensor's dims");
    if (dims > kMostDims) cursor.fail(cat("tensor '", tensor.name, "' has ", dims, " dims, ", kMostDims, " at most are allowed: damaged"));
    for (std::uint32_t d = 0; d < dims; ++d) {
      const auto size = cursor.take<std::uint64_t>("a tensor's sizes");
      if (size > static_cast<std::uint64_t>(INT64_MAX)) cursor.fail(cat("tensor '", tensor.name, "' has a size of ", size, ": damaged"));
      tensor.shape.insert(tensor.shape.begin(), static_cast<std::int64_t>(size));  // GGML has the contiguous dim first
    }
    if (checked_product(tensor.shape, 64) < 0) cursor.fail(cat("tensor '", tensor.name, "' has more elements than any file: damaged"));
    tensor.ggml_type = cursor.take<std::uint32_t>("a tensor's type");
    tensor.offset = cursor.take<std::uint64_t>("a tensor's offset");
    tensors.push_back(std::move(tensor));
  }
  return tensors;
}

std::uint64_t read_alignment(const GgufFile& file) {
  const auto alignment = static_cast<std::uint64_t>(file.find_integer("general.alignment").value_or(32));
  if (alignment < kLeastAlignment || alignment > kMostAlignment || (alignment & (alignment - 1)) != 0)
    fail_file(file.path(), cat("general.alignment is ", alignment, "; a power of two from ", kLeastAlignment, " up is wanted"));
  return alignment;
}

/// Where `tensor` lies in `data`.
std::span<const std::byte> bytes_of(const Tensor& tensor, const WeightView& view, std::span<const std::byte> data,
                                    const std::string& file) {
  if (view.cols % block_values(view.type) != 0)
    fail_file(file, cat("tensor '", tensor.name, "' has rows of ", view.cols, ", no multiple of ", file_type_name(view.type), "'s ",
                        block_values(view.type), ": damaged"));
  const auto size = static_cast<std::uint64_t>(view.rows) * static_cast<std::uint64_t>(view.row_bytes());
  if (tensor.offset > data.size() || size > data.size() - tensor.offset)
    fail_file(file, cat("tensor '", tensor.name, "' wants ", size, " bytes at ", tensor.offset, " of the data, which has ", data.size(),
                        ": cut short or damaged"));
  return data.subspan(tensor.offset, size);
}

void check_overlaps(std::vector<std::pair<std::span<const std::byte>, std::string>> parts, const std::string& file) {
  std::erase_if(parts, [](const auto& part) { return part.first.empty(); });
  std::sort(parts.begin(), parts.end(), [](const auto& a, const auto& b) { return a.first.data() < b.first.data(); });
  for (std::size_t i = 1; i < parts.size(); ++i)
    if (parts[i - 1].first.data() + parts[i - 1].first.size() > parts[i].first.data())
      fail_file(file, cat("tensors '", parts[i - 1].second, "' and '", parts[i].second, "' overlap: damaged"));
}

}  // namespace

GgufFile::GgufFile(const std::string& path) : GgufFile(std::make_unique<MappedFile>(path)) {}

GgufFile::GgufFile(std::unique_ptr<MappedFile> file) : WeightSource(file->path()), file_(std::move(file)) { read(); }

GgufFile::~GgufFile() = default;

void GgufFile::done_with(const WeightView& view) const { file_->done_with(view.data, view.rows * view.row_bytes()); }

void GgufFile::read() {
  GgufCursor cursor(file_->bytes(), path());
  check_version(cursor);
  const std::uint64_t tensor_count = cursor.count("the number of tensors", 8 + 4 + 4 + 8);
  const std::uint64_t key_count = cursor.count("the number of keys", 8 + 4 + 1);
  metadata_ = std::make_unique<nlohmann::json>(read_metadata(cursor, key_count));
  if (find_integer("split.count").value_or(1) > 1) fail_file(path(), "is one part of several; join them with llama-gguf-split --merge");
  const auto tensors = read_tensors(cursor, tensor_count);
  const std::uint64_t alignment = read_alignment(*this);
  const std::uint64_t start = (cursor.place() + alignment - 1) / alignment * alignment;
  const auto data = start < file_->bytes().size() ? file_->bytes().subspan(start) : std::span<const std::byte>();
  std::vector<std::pair<std::span<const std::byte>, std::string>> parts;
  for (const Tensor& tensor : tensors) {
    Entry entry{.view = {}, .shape = tensor.shape, .unusable = {}, .file = path()};
    set_rows(entry.view, tensor.shape);
    if (tensor.offset % alignment != 0)
      fail_file(path(), cat("tensor '", tensor.name, "' lies at ", tensor.offset, ", no multiple of ", alignment, ": damaged"));
    if (file_type_of(tensor.ggml_type, entry.view.type)) {
      const auto bytes = bytes_of(tensor, entry.view, data, path());
      entry.view.data = bytes.data();
      parts.emplace_back(bytes, tensor.name);
    } else {
      entry.unusable = cat("GGML ", tensor.ggml_type);
    }
    add(tensor.name, std::move(entry));
  }
  check_overlaps(std::move(parts), path());
}

const nlohmann::json* GgufFile::value(const std::string& key) const {
  const auto at = metadata_->find(key);
  return at == metadata_->end() ? nullptr : &*at;
}

void GgufFile::wrong_kind(const std::string& key, const char* wanted) const {
  const auto* found = value(key);
  if (found == nullptr) fail_file(path(), cat("has no '", key, "' in its metadata"));
  fail_file(path(), cat("'", key, "' is ", found->type_name(), ", ", wanted, " is wanted"));
}

std::optional<std::int64_t> GgufFile::find_integer(const std::string& key) const {
  const auto* found = value(key);
  if (found == nullptr) return std::nullopt;
  if (!found->is_number_integer() || (found->is_number_unsigned() && found->get<std::uint64_t>() > static_cast<std::uint64_t>(INT64_MAX)))
    wrong_kind(key, "an integer");
  return found->get<std::int64_t>();
}

std::optional<double> GgufFile::find_number(const std::string& key) const {
  const auto* found = value(key);
  if (found == nullptr) return std::nullopt;
  if (!found->is_number()) wrong_kind(key, "a number");
  return found->get<double>();
}

std::optional<std::string> GgufFile::find_text(const std::string& key) const {
  const auto* found = value(key);
  if (found == nullptr) return std::nullopt;
  if (!found->is_string()) wrong_kind(key, "a text");
  return found->get<std::string>();
}

std::optional<bool> GgufFile::find_boolean(const std::string& key) const {
  const auto* found = value(key);
  if (found == nullptr) return std::nullopt;
  if (!found->is_boolean()) wrong_kind(key, "true or false");
  return found->get<bool>();
}

std::int64_t GgufFile::integer(const std::string& key) const {
  if (const auto found = find_integer(key)) return *found;
  wrong_kind(key, "an integer");
}

double GgufFile::number(const std::string& key) const {
  if (const auto found = find_number(key)) return *found;
  wrong_kind(key, "a number");
}

std::string GgufFile::text(const std::string& key) const {
  if (const auto found = find_text(key)) return *found;
  wrong_kind(key, "a text");
}

}  // namespace unshard::inference
