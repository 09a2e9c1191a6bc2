#include "checkpoint/keep.h"

#include <algorithm>
#include <filesystem>
#include <utility>
#include <vector>

#include "checkpoint/manifest.h"
#include "checkpoint/system_file.h"
#include "unshard/checkpoint/source.h"
#include "unshard/core/error.h"
#include "unshard/core/log.h"

namespace unshard::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kMostTagBytes = 4096;
const char* const kDeleted = ".deleted";

// What a save or a removal that was interrupted left; other folders that happen to be named so are not ours.
bool is_left_over(const fs::path& folder) {
  const auto name = folder.filename().string();
  const bool named = name.ends_with(kDeleted) || name.ends_with(".partial") || name.ends_with(".former");
  return named && (fs::is_empty(folder) || fs::exists(folder / rank_file(0)) || fs::exists(folder / kManifestFile));
}

// Renamed first, so that a half removed folder never looks like a checkpoint.
void remove_folder(const fs::path& folder) {
  auto renamed = folder;
  renamed += kDeleted;
  fs::remove_all(renamed);
  fs::rename(folder, renamed);
  fs::remove_all(renamed);
}

}  // namespace

std::string former_of(const std::string& directory) { return directory + ".former"; }

std::string present_of(const std::string& directory) {
  std::error_code ignored;
  if (!fs::exists(directory, ignored) && fs::exists(former_of(directory) + "/" + kManifestFile, ignored)) return former_of(directory);
  return directory;
}

std::string latest_tag(const std::string& save_dir) {
  const auto path = save_dir + "/latest";
  std::error_code ignored;
  if (!fs::exists(path, ignored)) return {};
  auto tag = read_text(path, kMostTagBytes);
  const auto is_space = [](char c) { return c == ' ' || c == '\n' || c == '\r' || c == '\t'; };
  while (!tag.empty() && is_space(tag.back())) tag.pop_back();
  while (!tag.empty() && is_space(tag.front())) tag.erase(tag.begin());
  if (tag.empty() || tag.find('\0') != std::string::npos) fail(path, "names no tag: damaged");
  return tag;
}

void remove_old(const std::string& save_dir, int keep) {
  try {
    const auto latest = latest_tag(save_dir);
    std::vector<std::pair<fs::file_time_type, fs::path>> saved;
    std::vector<fs::path> left;
    for (const auto& entry : fs::directory_iterator(save_dir)) {
      if (!entry.is_directory()) continue;
      if (is_left_over(entry.path())) {
        left.push_back(entry.path());
      } else if (fs::exists(entry.path() / kManifestFile) && fs::exists(entry.path() / rank_file(0))) {
        saved.emplace_back(fs::last_write_time(entry.path() / kManifestFile), entry.path());
      }
    }
    for (const auto& folder : left) fs::remove_all(folder);
    std::sort(saved.begin(), saved.end(), std::greater<>());
    for (std::size_t i = static_cast<std::size_t>(keep); i < saved.size(); ++i) {
      if (saved[i].second.filename() != latest) remove_folder(saved[i].second);
    }
  } catch (const std::exception& error) {
    log_warning(0, cat("old checkpoints of ", save_dir, " could not be removed: ", error.what()));
  }
}

}  // namespace unshard::checkpoint
