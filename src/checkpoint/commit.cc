#include "checkpoint/commit.h"

#include <fcntl.h>
#include <stdio.h>  // renameat2

#include <cerrno>
#include <filesystem>
#include <thread>
#include <utility>

#include "checkpoint/keep.h"
#include "checkpoint/system_file.h"
#include "unshard/core/error.h"

namespace unshard::checkpoint {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr std::int64_t kMostReportBytes = std::int64_t{1} << 30;

std::string report_path(const std::string& partial, int rank) { return cat(partial, "/", rank_file(rank), ".json"); }

void read_report(const std::string& path, const std::string& partial, int rank, Manifest& manifest) {
  const auto document = parse_json(read_text(path, kMostReportBytes), path);
  const JsonReader reader(document, path);
  if (const auto error = reader.find("error")) throw CheckpointError(cat("rank ", rank, " failed: ", error->text()));
  auto record = read_file_record(reader.at("file"));
  const auto file = partial + "/" + rank_file(rank);
  if (const auto bytes = file_bytes(open_to_read(file), file); bytes != record.bytes)
    fail(file, cat("has ", bytes, " bytes here, rank ", rank, " wrote ", record.bytes, ": all hosts must see the same folder"));
  manifest.files[rank_file(rank)] = std::move(record);
}

void wait_for_reports(const std::string& directory, Manifest& manifest, const CommitOptions& options) {
  const auto partial = partial_of(directory);
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration_cast<std::chrono::nanoseconds>(options.limit);
  auto pause = std::chrono::milliseconds(1);
  for (int rank = 0; rank < manifest.contents.world_size; ++rank) {
    const auto path = report_path(partial, rank);
    std::error_code ignored;
    while (!fs::exists(path, ignored)) {
      const auto lost = options.lost ? options.lost() : std::string();
      if (fs::exists(path, ignored)) break;  // it may have gone after it was done
      if (!lost.empty()) throw CheckpointError(cat("[checkpoint] ", directory, " wasn't finished: ", lost));
      if (std::chrono::steady_clock::now() > end) {
        fail(partial, cat("rank ", rank, "'s file isn't there after ", options.limit.count(),
                          " s; every host must see the folder that is saved to"));
      }
      std::this_thread::sleep_for(pause);
      pause = std::min(pause * 2, std::chrono::milliseconds(100));
    }
    read_report(path, partial, rank, manifest);
  }
}

// Both names exist at every moment; file systems that can't exchange get two renames, and a loader looks at the name between them.
void put_in_place(const std::string& partial, const std::string& directory) {
  std::error_code ignored;
  if (!fs::exists(directory, ignored)) {
    if (::rename(partial.c_str(), directory.c_str()) != 0) fail_system(directory, cat("can't rename ", partial, " to it"));
    return;
  }
  if (::renameat2(AT_FDCWD, partial.c_str(), AT_FDCWD, directory.c_str(), RENAME_EXCHANGE) == 0) {
    sync_path(fs::path(directory).parent_path().string());
    fs::remove_all(partial, ignored);
    return;
  }
  if (errno != EINVAL && errno != ENOSYS && errno != EOPNOTSUPP) fail_system(directory, cat("can't exchange it with ", partial));
  const auto former = former_of(directory);
  fs::remove_all(former, ignored);
  if (::rename(directory.c_str(), former.c_str()) != 0) fail_system(directory, cat("can't rename it to ", former));
  if (::rename(partial.c_str(), directory.c_str()) != 0) fail_system(directory, cat("can't rename ", partial, " to it"));
  sync_path(fs::path(directory).parent_path().string());
  fs::remove_all(former, ignored);
}

void commit_or_throw(const std::string& directory, Manifest& manifest, const CommitOptions& options) {
  const auto partial = partial_of(directory), parent = fs::path(directory).parent_path().string();
  wait_for_reports(directory, manifest, options);
  const auto text = manifest.to_text();
  Manifest::parse(text, partial + "/" + kManifestFile);  // what couldn't be loaded isn't saved
  write_text(partial + "/" + kManifestFile, text);
  for (int rank = 0; rank < manifest.contents.world_size; ++rank) fs::remove(report_path(partial, rank));
  sync_path(partial);
  put_in_place(partial, directory);
  sync_path(parent);
  if (options.write_latest) {
    const auto above = options.latest_in.empty() ? parent : options.latest_in;
    write_text(above + "/latest", fs::path(directory).lexically_relative(above).generic_string());
    sync_path(above);
  }
  if (options.keep > 0) remove_old(parent, options.keep);
}

}  // namespace

std::string partial_of(const std::string& directory) { return directory + ".partial"; }

void begin_save(const std::string& directory) {
  std::error_code error;
  fs::remove_all(partial_of(directory), error);
  if (error) fail(partial_of(directory), cat("can't remove what an interrupted save left: ", error.message()));
  fs::create_directories(partial_of(directory), error);
  if (error) fail(partial_of(directory), cat("can't create: ", error.message()));
}

void report_file(const std::string& directory, int rank, const FileRecord& record, const std::string& error) {
  Json json;
  if (error.empty()) {
    json["file"] = to_json(record);
  } else {
    json["error"] = error;
  }
  // Broken text in an error must not hide it.
  write_text(report_path(partial_of(directory), rank), json.dump(-1, ' ', false, Json::error_handler_t::replace));
}

void commit(const std::string& directory, Manifest manifest, const CommitOptions& options) {
  try {
    commit_or_throw(directory, manifest, options);
  } catch (const std::exception& error) {
    std::error_code ignored;
    fs::remove_all(partial_of(directory), ignored);
    throw CheckpointError(error.what());
  }
}

}  // namespace unshard::checkpoint
