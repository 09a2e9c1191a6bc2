#pragma once
// Folders and values for the tests of files.
#include <ATen/ops/arange.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <string>

#include "checkpoint/commit.h"
#include "checkpoint/tensor_file.h"
#include "unshard/checkpoint/source.h"
#include "unshard/core/error.h"
#include "unshard/zero/layout.h"

namespace unshard::checkpoint::testing {

/// A new folder that goes with the object.
class Folder {
 public:
  explicit Folder(const std::filesystem::path& in = std::filesystem::temp_directory_path()) {
    std::string name = (in / "unshard_checkpoint_XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("no folder for a test");
    path_ = name;
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  std::string operator/(const std::string& name) const { return (path_ / name).string(); }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

inline std::string contents_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}
inline void put(const std::string& path, const std::string& text) { std::ofstream(path, std::ios::binary) << text; }

/// What a CheckpointError of `work` says; empty: it has none.
inline std::string error_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const CheckpointError& error) {
    return error.what();
  }
  return {};
}

/// [numel] of 0, 1, 2, ... + first.
inline at::Tensor counted(std::int64_t numel, double first = 0) {
  return at::arange(first, first + static_cast<double>(numel), at::kFloat);
}

/// Two parameters of [10] and [3], the first with a master and a state, as `world` ranks would write them. Values: counted(), the state's
/// from 100 on.
inline void write_sample(const std::string& directory, int world, const CommitOptions& options = {}) {
  begin_save(directory);
  Manifest manifest;
  manifest.contents.world_size = world;
  manifest.contents.tag = std::filesystem::path(directory).filename().string();
  manifest.contents.optimizer_type = "adamw";
  manifest.contents.optimizer_states = {"exp_avg"};
  manifest.contents.groups = manifest.contents.initial_groups = {GroupOptions{}};
  manifest.contents.parameters = {{"w", {2, 5}, {5, 1}, "bf16", 0, 4, false, {}}, {"b", {3}, {1}, "fp32", -1, 0, false, {}}};
  const std::pair<Range, double> values[] = {{{kFp32, "w", 0, 10}, 0}, {{"exp_avg", "w", 0, 10}, 100}, {{kParam, "b", 0, 3}, 0}};
  for (int rank = 0; rank < world; ++rank) {
    NamedTensors tensors;
    FileRecord record;
    for (const auto& [range, first] : values) {
      const ShardLayout layout{range.end, world};
      if (layout.size(rank) == 0) continue;
      const auto key = range.kind + "." + range.name;
      tensors.emplace_back(key, counted(layout.size(rank), first + static_cast<double>(layout.begin(rank))));
      record.pieces[key] = {range.name, range.kind, layout.begin(rank), layout.end(rank), 0};
    }
    const auto written = write_tensor_file(partial_of(directory) + "/" + rank_file(rank), tensors, {});
    record.bytes = written.bytes;
    for (auto& [key, piece] : record.pieces) piece.crc32c = written.parts.at(key);
    report_file(directory, rank, record, {});
  }
  commit(directory, std::move(manifest), options);
}

}  // namespace unshard::checkpoint::testing
