#include "inference/stream/load_within.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <numeric>

#include "inference/stream/convert.h"
#include "inference/stream/weight_file.h"
#include "unshard/core/error.h"
#include "unshard/core/log.h"
#include "unshard/inference/engine.h"

namespace unshard::inference {
namespace {

/// The model without values: all shapes, and the units that its matrices belong to.
struct Frame {
  ModelWeights weights;
  std::vector<Unit> units;
  std::vector<Range> outputs;
  std::vector<std::int64_t> unit_bytes() const {
    std::vector<std::int64_t> bytes;
    for (const auto& unit : units) bytes.push_back(unit.bytes);
    return bytes;
  }
  std::int64_t bytes() const {
    const auto each = unit_bytes();
    return std::accumulate(each.begin(), each.end(), std::int64_t{0});
  }
};

Frame frame_of(const WeightSource& source, const ModelConfig& config, const std::string& dtype, const Shard& shard) {
  Frame frame;
  const auto describe = [&](std::span<const WeightView> parts, WeightType type, bool gated) {
    Matrix matrix = Matrix::describe(parts, type, gated);
    frame.units.back().add(matrix.packed());
    return matrix;
  };
  WeightLoader loader(source, config, dtype, shard, describe, false);
  frame.weights = loader.frame();
  for (std::int64_t i = 0; i < config.layers; ++i) {
    frame.units.emplace_back();
    frame.weights.layers.push_back(loader.layer(i));
  }
  // The output matrix is often as large as many layers: in parts about as large as one it needs no larger slots.
  const auto vocabulary = loader.vocabulary();
  const std::int64_t step = kMaxTilePanels * kPanelRows, largest = std::ranges::max(frame.unit_bytes());
  frame.units.emplace_back();
  const auto whole = loader.output(vocabulary).linear.matrix.bytes();
  frame.units.pop_back();
  const auto rows = round_up(std::max<std::int64_t>(1, vocabulary.size() * largest / std::max<std::int64_t>(whole, 1)), step);
  WeightLoader parts(source, config, dtype, shard, describe, false);
  for (auto first = vocabulary.begin; first < vocabulary.end; first += rows) {
    frame.outputs.push_back({first, std::min(first + rows, vocabulary.end)});
    frame.units.emplace_back();
    frame.weights.outputs.push_back(parts.output(frame.outputs.back()));
  }
  loader.sum_up(frame.weights);
  return frame;
}

/// While it is held no other process converts to the same file. Where the file system has no locks each converts for itself.
class Lock {
 public:
  Lock(const std::string& path, bool talks) : fd_(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644)) {
    if (fd_ < 0) return;
    held_ = ::flock(fd_, LOCK_EX | LOCK_NB) == 0;
    if (held_ || errno != EWOULDBLOCK) return;
    if (talks) log_info(cat("another process is packing these weights (", path, "): waiting for it"));
    while (!(held_ = ::flock(fd_, LOCK_EX) == 0) && errno == EINTR) {
    }
  }
  ~Lock() {
    if (fd_ >= 0) ::close(fd_);
  }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;
  bool held() const { return held_; }

 private:
  int fd_;
  bool held_ = false;
};

/// What killed processes left. Under the lock nobody is at work on one.
void remove_parts(const std::filesystem::path& file) {
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(file.parent_path(), error))
    if (entry.path().filename().string().starts_with(file.filename().string() + ".part.")) std::filesystem::remove(entry.path(), error);
}

std::filesystem::path folder_for(const MemoryBudget& budget, const std::string& model) {
  auto folder = std::filesystem::path(budget.folder);
  const auto path = std::filesystem::weakly_canonical(model);
  if (folder.empty()) folder = (std::filesystem::is_directory(path) ? path : path.parent_path()) / ".unshard";
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error)
    throw ModelError(cat(folder.string(), ": packed weights can't be put there: ", error.message(), "; weight_cache names another folder"));
  return folder;
}

}  // namespace

LoadedWeights load_within(const MemoryBudget& budget, const WeightSource& source, const ModelConfig& config, const std::string& dtype,
                          const Shard& shard, Workers& workers) {
  const auto all_in_memory = [&] { return LoadedWeights{load_weights(source, config, dtype, shard, workers), nullptr}; };
  if (budget.bytes == 0) return all_in_memory();
  Frame frame = frame_of(source, config, dtype, shard);
  if (frame.bytes() <= budget.bytes) return all_in_memory();
  const auto plan = plan_residency(frame.unit_bytes(), budget.bytes, source.path());
  const auto key = weight_key(source.path(), dtype, shard);
  const auto path = folder_for(budget, source.path()) / weight_file_name(source.path(), key);
  const UnitLoader loader{source, config, dtype, shard, frame.outputs};
  for (bool made = false;;) {
    std::optional<WeightFile> found;
    {
      const Lock lock(path.string() + ".lock", shard.rank == 0);
      found = open_weight_file(path, key, frame.units);
      if (!found || made) {
        if (shard.rank == 0) log_info(cat(source.path(), ": packing its weights into ", path.string(), ", ", frame.bytes() >> 20, " MB"));
        if (lock.held()) remove_parts(path);
        convert_weights(loader, frame.units, path, key, plan.slots > 1, workers);
        found = open_weight_file(path, key, frame.units);
        made = true;
      }
    }
    if (!found) throw ModelError(cat(path.string(), ": isn't what was just written to it; is another program at work there?"));
    auto stream = std::make_unique<WeightStream>(frame.units, plan, std::move(found->file), std::move(found->units));
    const auto damaged = stream->check();
    if (damaged.empty()) return {std::move(frame.weights), std::move(stream)};
    if (made)
      throw ModelError(cat(path.string(), ": part ", damaged.front(), " is damaged though it was just written; is the disk failing?"));
    log_warning(shard.rank, cat(path.string(), ": is damaged; its weights are packed anew"));
    made = true;
  }
}

}  // namespace unshard::inference
