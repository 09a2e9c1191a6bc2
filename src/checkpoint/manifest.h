#pragma once
// manifest.json: what a checkpoint holds and which file has which elements of it.
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/json_reader.h"
#include "unshard/checkpoint/contents.h"

namespace unshard::checkpoint {

inline constexpr int kFormat = 2;
inline constexpr const char* kManifestFile = "manifest.json";
/// Names of the files of Python's (or the user's) own state.
inline constexpr const char* kStateText = "state.json";
inline constexpr const char* kStateTensors = "state.safetensors";
std::string rank_file(int rank);

/// A tensor of a file: elements [begin, end) of one kind of value of one parameter.
struct Piece {
  std::string parameter, kind;
  std::int64_t begin = 0, end = 0;
  std::uint32_t crc32c = 0;
};

struct FileRecord {
  std::int64_t bytes = 0;
  std::optional<std::uint32_t> crc32c;  ///< of the whole file: what has no pieces
  std::map<std::string, Piece> pieces;  ///< by the tensor's name in the file
};

nlohmann::json to_json(const FileRecord& record);
FileRecord read_file_record(const JsonReader& reader);

/// The parts that every Source has; `kinds` are read where they are written.
nlohmann::json to_json(const Contents& contents);
Contents read_contents(const JsonReader& reader, std::string origin);

struct Manifest {
  Contents contents;
  std::map<std::string, FileRecord> files;

  std::string to_text() const;
  /// Fills the parameters' `kinds` from the pieces. \throws CheckpointError naming `path` and the first thing that is wrong: JSON, types,
  /// another format, pieces that don't cover every value exactly once, file names that lead out of the folder.
  static Manifest parse(const std::string& text, const std::string& path);
  static Manifest read(const std::string& directory);
};

}  // namespace unshard::checkpoint
