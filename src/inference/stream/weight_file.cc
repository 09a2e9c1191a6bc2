#include "inference/stream/weight_file.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <iomanip>

#include "inference/stream/checksum.h"
#include "unshard/core/error.h"
#include "unshard/inference/engine.h"

namespace unshard::inference {
namespace {

constexpr char kMagic[] = "unshard packed weights 1\n";  // another number where packing or this layout changes
constexpr std::int64_t kWord = 8;

std::string fact_of(const std::filesystem::path& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) throw ModelError(cat(path.string(), ": can't be looked at: ", std::strerror(errno)));
  return cat("file ", path.filename().string(), ' ', status.st_size, ' ', status.st_mtim.tv_sec, '.', status.st_mtim.tv_nsec, '\n');
}

/// The files that weights and their packing depend on.
std::vector<std::filesystem::path> files_of(const std::filesystem::path& model) {
  if (!std::filesystem::is_directory(model)) return {model};
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(model)) {
    const auto name = entry.path().filename().string();
    if (name.ends_with(".safetensors") || name.ends_with(".index.json") || name == "config.json") files.push_back(entry.path());
  }
  std::ranges::sort(files);
  return files;
}

void put(std::string& out, std::uint64_t word) {
  char bytes[kWord];
  std::memcpy(bytes, &word, sizeof bytes);
  out.append(bytes, sizeof bytes);
}

std::string hex(std::uint64_t value) {
  std::ostringstream text;
  text << std::hex << std::setfill('0') << std::setw(16) << value;
  return text.str();
}

}  // namespace

std::string weight_key(const std::string& model, const std::string& dtype, const Shard& shard) {
  const auto path = std::filesystem::weakly_canonical(model);
  const auto& kernels = current_kernels();
  std::string key = cat("model ", path.string(), "\ndtype ", dtype, "\nkernels ", kernels.name, ' ', kernels.tile_panels, "\nshard ",
                        shard.rank, " of ", shard.size, '\n');
  for (const auto& file : files_of(path)) key += fact_of(file);
  return key;
}

std::string weight_file_name(const std::string& model, const std::string& key) {
  const auto lasting = key.substr(0, key.find("\nfile "));
  return cat(std::filesystem::weakly_canonical(model).filename().string(), '-', hex(checksum(lasting.data(), lasting.size())), ".weights");
}

std::int64_t header_bytes(const std::string& key, std::size_t units) {
  const auto words = 2 * static_cast<std::int64_t>(units) + 1;
  return offload::whole_blocks(static_cast<std::int64_t>(sizeof kMagic - 1 + key.size()) + kWord * words);
}

/// Magic, key, the units' sizes and checksums, zeros; its own checksum is the last word.
std::string header_of(const std::string& key, const std::vector<Unit>& units, const std::vector<StoredUnit>& stored) {
  std::string header = kMagic + key;
  for (std::size_t i = 0; i < units.size(); ++i) {
    put(header, static_cast<std::uint64_t>(units[i].bytes));
    put(header, stored[i].checksum);
  }
  header.resize(static_cast<std::size_t>(header_bytes(key, units.size()) - kWord));
  put(header, checksum(header.data(), header.size()));
  return header;
}

std::optional<WeightFile> open_weight_file(const std::string& path, const std::string& key, const std::vector<Unit>& units) {
  std::error_code error;
  if (!std::filesystem::exists(path, error)) return std::nullopt;
  try {
    WeightFile found{offload::AsyncFile(path, offload::Access::read), {}};
    std::string header(static_cast<std::size_t>(header_bytes(key, units.size())), '\0');
    auto end = static_cast<std::int64_t>(header.size());
    for (const auto& unit : units) {
      found.units.push_back({end, 0});
      end += unit.bytes;
    }
    if (found.file.bytes() != end) return std::nullopt;
    offload::AsyncQueue queue({.queue_depth = 1, .threads = 1});
    queue.wait(queue.read(found.file, 0, static_cast<std::int64_t>(header.size()), header.data()));
    for (std::size_t i = 0; i < units.size(); ++i)
      std::memcpy(&found.units[i].checksum, header.data() + sizeof kMagic - 1 + key.size() + (2 * i + 1) * kWord, kWord);
    if (header != header_of(key, units, found.units)) return std::nullopt;
    return found;
  } catch (const offload::FileError& failure) {
    throw ModelError(cat("packed weights can't be read: ", failure.what()));
  }
}

}  // namespace unshard::inference
