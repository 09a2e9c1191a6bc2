#include "inference/weights/safetensors.h"

#include <sys/stat.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "unshard/core/error.h"

namespace unshard::inference {
namespace {

using Json = nlohmann::json;

constexpr std::uint64_t kHeaderBytes = 100'000'000;  // the limit of Hugging Face's own reader

struct Dtype {
  const char* name;
  std::int64_t bytes;
  bool usable;
  FileType type;
};
constexpr Dtype kDtypes[] = {
    {"F32", 4, true, FileType::f32},
    {"F16", 2, true, FileType::f16},
    {"BF16", 2, true, FileType::bf16},
    {"F64", 8, false, {}},
    {"I64", 8, false, {}},
    {"I32", 4, false, {}},
    {"I16", 2, false, {}},
    {"I8", 1, false, {}},
    {"U64", 8, false, {}},
    {"U32", 4, false, {}},
    {"U16", 2, false, {}},
    {"U8", 1, false, {}},
    {"BOOL", 1, false, {}},
    {"F8_E4M3", 1, false, {}},
    {"F8_E5M2", 1, false, {}},
    {"F8_E8M0", 1, false, {}},
};

const Dtype* find_dtype(const std::string& name) {
  const auto* at = std::find_if(std::begin(kDtypes), std::end(kDtypes), [&](const Dtype& dtype) { return name == dtype.name; });
  return at == std::end(kDtypes) ? nullptr : at;
}

/// Equal keys of one object would hide one another; no honest writer makes them.
Json parse(std::span<const std::byte> bytes, const std::string& file, const char* what) {
  std::set<std::string> top;
  std::string twice;
  const auto watch = [&](int depth, Json::parse_event_t event, const Json& key) {
    if (event == Json::parse_event_t::key && depth == 1 && !top.insert(key.get<std::string>()).second) twice = key.get<std::string>();
    return true;
  };
  const char* begin = reinterpret_cast<const char*>(bytes.data());
  Json json;
  try {
    json = Json::parse(begin, begin + bytes.size(), watch);
  } catch (const Json::exception& error) {
    fail_file(file, cat(what, " is damaged: ", error.what()));
  }
  if (!twice.empty()) fail_file(file, cat("tensor '", twice, "' comes twice: damaged or foreign"));
  if (!json.is_object()) fail_file(file, cat(what, " is ", json.type_name(), ", not an object: damaged or foreign"));
  return json;
}

/// A list of integers of at least 0.
std::vector<std::int64_t> sizes_of(const Json& tensor, const char* key, const std::string& name, const std::string& file) {
  const auto at = tensor.find(key);
  if (at == tensor.end() || !at->is_array()) fail_file(file, cat("tensor '", name, "' has no list '", key, "': damaged or foreign"));
  std::vector<std::int64_t> sizes;
  for (const Json& size : *at) {
    if (!size.is_number_unsigned() || size.get<std::uint64_t>() > static_cast<std::uint64_t>(INT64_MAX))
      fail_file(file, cat("tensor '", name, "' has a '", key, "' with something other than sizes in it: damaged or foreign"));
    sizes.push_back(size.get<std::int64_t>());
  }
  return sizes;
}

struct Range {
  std::int64_t begin, end;
};

Range range_of(const Json& tensor, const std::string& name, const std::string& file, std::int64_t data_bytes) {
  const auto offsets = sizes_of(tensor, "data_offsets", name, file);
  if (offsets.size() != 2 || offsets[0] > offsets[1])
    fail_file(file, cat("tensor '", name, "' has wrong data_offsets: damaged or foreign"));
  if (offsets[1] > data_bytes)
    fail_file(file,
              cat("tensor '", name, "' ends at byte ", offsets[1], " of the data, the file has ", data_bytes, ": cut short or damaged"));
  return {offsets[0], offsets[1]};
}

/// The format wants every byte of the data to belong to one tensor, which also rules out overlaps.
void check_cover(std::vector<std::pair<Range, std::string>> ranges, const std::string& file, std::int64_t data_bytes) {
  std::sort(ranges.begin(), ranges.end(),
            [](const auto& a, const auto& b) { return std::pair(a.first.begin, a.first.end) < std::pair(b.first.begin, b.first.end); });
  std::int64_t end = 0;
  for (const auto& [range, name] : ranges) {
    if (range.begin != end)
      fail_file(file,
                cat("tensor '", name, "' begins at byte ", range.begin, " of the data, the one before it ends at ", end, ": damaged"));
    end = range.end;
  }
  if (end != data_bytes) fail_file(file, cat("tensors take ", end, " bytes, the file has ", data_bytes, " for them: damaged"));
}

bool exists(const std::string& path) {
  struct stat status {};
  return ::stat(path.c_str(), &status) == 0;
}

}  // namespace

SafetensorsFile::SafetensorsFile(const std::string& path) : SafetensorsFile(std::make_unique<MappedFile>(path)) {}

SafetensorsFile::SafetensorsFile(std::unique_ptr<MappedFile> file) : WeightSource(file->path()), file_(std::move(file)) { read_header(); }

SafetensorsFile::~SafetensorsFile() = default;

void SafetensorsFile::done_with(const WeightView& view) const { file_->done_with(view.data, view.rows * view.row_bytes()); }

void SafetensorsFile::read_header() {
  const auto bytes = file_->bytes();
  std::uint64_t header_bytes = 0;
  if (bytes.size() < 8) fail_file(path(), cat("is ", bytes.size(), " bytes, too short for safetensors"));
  std::memcpy(&header_bytes, bytes.data(), 8);
  if (header_bytes > bytes.size() - 8 || header_bytes > kHeaderBytes)
    fail_file(path(), cat("says its header has ", header_bytes, " bytes, the file has ", bytes.size(), ": not safetensors, or cut short"));
  const auto data = bytes.subspan(8 + header_bytes);
  const auto data_bytes = static_cast<std::int64_t>(data.size());
  const Json header = parse(bytes.subspan(8, header_bytes), path(), "header");
  std::vector<std::pair<Range, std::string>> ranges;
  for (const auto& [name, tensor] : header.items()) {
    if (name == "__metadata__") continue;
    const auto dtype = tensor.is_object() ? tensor.find("dtype") : tensor.end();
    if (!tensor.is_object() || dtype == tensor.end() || !dtype->is_string())
      fail_file(path(), cat("tensor '", name, "' has no dtype: damaged or foreign"));
    const auto dtype_name = dtype->get<std::string>();
    const Dtype* known = find_dtype(dtype_name);
    Entry entry{.view = {}, .shape = sizes_of(tensor, "shape", name, path()), .unusable = {}, .file = path()};
    if (known == nullptr || !known->usable) entry.unusable = dtype_name;
    const Range range = range_of(tensor, name, path(), data_bytes);
    const std::int64_t wanted = checked_product(entry.shape, known == nullptr ? 1 : known->bytes);
    if (wanted < 0 || (known != nullptr && wanted != range.end - range.begin))
      fail_file(path(), cat("tensor '", name, "' has ", range.end - range.begin, " bytes, its shape and type want ", wanted, ": damaged"));
    if (known != nullptr) entry.view.type = known->type;
    ranges.emplace_back(range, name);
    add_tensor(name, std::move(entry), data.subspan(range.begin, range.end - range.begin));
  }
  check_cover(std::move(ranges), path(), data_bytes);
}

void SafetensorsFile::add_tensor(const std::string& name, Entry entry, std::span<const std::byte> bytes) {
  entry.view.data = bytes.data();
  const std::uintptr_t alignment = entry.view.type == FileType::f32 ? 4 : 2;
  if (entry.unusable.empty() && reinterpret_cast<std::uintptr_t>(bytes.data()) % alignment != 0) {
    aligned_.push_back(std::make_unique_for_overwrite<std::byte[]>(bytes.size()));
    std::copy(bytes.begin(), bytes.end(), aligned_.back().get());
    entry.view.data = aligned_.back().get();
  }
  set_rows(entry.view, entry.shape);
  add(name, std::move(entry));
}

SafetensorsFolder::SafetensorsFolder(const std::string& folder) : WeightSource(folder) {
  const std::string single = folder + "/model.safetensors", index = single + ".index.json";
  if (exists(single)) {
    auto file = std::make_unique<SafetensorsFile>(single);
    for (const auto& name : file->names()) add(name, file->entry(name));
    files_.push_back(std::move(file));
  } else if (exists(index)) {
    read_index(index);
  } else {
    fail_file(folder, "holds neither model.safetensors nor model.safetensors.index.json; save the model with save_pretrained()");
  }
}

SafetensorsFolder::~SafetensorsFolder() = default;

void SafetensorsFolder::done_with(const WeightView& view) const {
  for (const auto& file : files_) file->done_with(view);
}

void SafetensorsFolder::read_index(const std::string& index_path) {
  const MappedFile index(index_path);
  const Json json = parse(index.bytes(), index_path, "the index");
  const auto map = json.find("weight_map");
  if (map == json.end() || !map->is_object()) fail_file(index_path, "has no object 'weight_map': damaged or foreign");
  std::map<std::string, const SafetensorsFile*> opened;
  for (const auto& [name, value] : map->items()) {
    const auto file = value.is_string() ? value.get<std::string>() : std::string();
    if (file.empty() || file == ".." || file.find('/') != std::string::npos || file.find('\0') != std::string::npos)
      fail_file(index_path, cat("gives no file name of this folder for tensor '", name, "': damaged or foreign"));
    auto& source = opened[file];
    if (source == nullptr) {
      files_.push_back(std::make_unique<SafetensorsFile>(path() + "/" + file));
      source = files_.back().get();
    }
    add(name, source->entry(name));
  }
}

}  // namespace unshard::inference
