#include "checkpoint/manifest.h"

#include <algorithm>
#include <filesystem>
#include <set>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "checkpoint/system_file.h"
#include "unshard/core/error.h"

namespace unshard::checkpoint {
namespace {

using Json = nlohmann::json;

constexpr std::int64_t kMostManifestBytes = std::int64_t{4} << 30;

// A name in the manifest must be a file of the folder, not a way out of it.
bool is_plain_name(const std::string& name) {
  return !name.empty() && name != "." && name != ".." && name.find('/') == std::string::npos && name.find('\0') == std::string::npos;
}

struct Span {
  const Piece* piece;
  const std::string* file;
};

// The pieces of one kind of value must be all of it, each element once.
void check_cover(const std::string& path, const SavedParameter& parameter, const std::string& kind, std::vector<Span>& spans) {
  std::sort(spans.begin(), spans.end(),
            [](const Span& a, const Span& b) { return std::tie(a.piece->begin, a.piece->end) < std::tie(b.piece->begin, b.piece->end); });
  std::int64_t next = 0;
  for (const auto& span : spans) {
    if (span.piece->begin != next) {
      fail(path, cat("elements [", std::min(next, span.piece->begin), ", ", std::max(next, span.piece->begin), ") of '", kind, ".",
                     parameter.name, "' are ", next < span.piece->begin ? "in no file" : cat("in two files, one of them ", *span.file)));
    }
    next = span.piece->end;
  }
  if (next != parameter.numel())
    fail(path, cat("'", kind, ".", parameter.name, "' has ", next, " of its ", parameter.numel(), " elements in the files"));
}

// Also fills the parameters' kinds.
void check_pieces(Manifest& manifest, const std::string& path) {
  std::unordered_map<std::string, std::size_t> place;
  for (std::size_t i = 0; i < manifest.contents.parameters.size(); ++i) place[manifest.contents.parameters[i].name] = i;
  std::set<std::string> known(manifest.contents.optimizer_states.begin(), manifest.contents.optimizer_states.end());
  known.insert({kParam, kFp32});
  std::vector<std::map<std::string, std::vector<Span>>> spans(manifest.contents.parameters.size());
  for (const auto& [file, record] : manifest.files) {
    for (const auto& [key, piece] : record.pieces) {
      const auto at = place.find(piece.parameter);
      if (at == place.end()) fail(path, cat("'", key, "' of ", file, " belongs to '", piece.parameter, "', which isn't a parameter"));
      if (!known.contains(piece.kind))
        fail(path, cat("'", key, "' of ", file, " is of kind '", piece.kind, "', which the optimizer lacks"));
      spans[at->second][piece.kind].push_back({&piece, &file});
    }
  }
  for (std::size_t i = 0; i < spans.size(); ++i) {
    auto& parameter = manifest.contents.parameters[i];
    parameter.kinds.clear();
    for (auto& [kind, list] : spans[i]) {
      check_cover(path, parameter, kind, list);
      parameter.kinds.push_back(kind);
    }
    if (parameter.excluded != parameter.value_kind().empty())
      fail(path, cat("'", parameter.name, "' ", parameter.excluded ? "is said to be left out, but is there" : "has no values in any file"));
  }
}

}  // namespace

std::string rank_file(int rank) { return cat("rank_", rank, ".safetensors"); }

Json to_json(const FileRecord& record) {
  Json json = {{"bytes", record.bytes}};
  if (record.crc32c) json["crc32c"] = checksum_text(*record.crc32c);
  if (record.crc32c) return json;
  json["tensors"] = Json::object();
  for (const auto& [key, piece] : record.pieces) {
    json["tensors"][key] = {{"parameter", piece.parameter},
                            {"kind", piece.kind},
                            {"begin", piece.begin},
                            {"end", piece.end},
                            {"crc32c", checksum_text(piece.crc32c)}};
  }
  return json;
}

FileRecord read_file_record(const JsonReader& reader) {
  FileRecord record;
  record.bytes = reader.at("bytes").integer_in(0, INT64_MAX);
  if (const auto crc = reader.find("crc32c")) record.crc32c = crc->checksum();
  const auto tensors = reader.find("tensors");
  if (!tensors && !record.crc32c) reader.fail("has neither a checksum nor tensors");
  if (!tensors) return record;
  for (const auto& [key, value] : tensors->members()) {
    Piece piece;
    piece.parameter = value.at("parameter").text();
    piece.kind = value.at("kind").text();
    piece.begin = value.at("begin").integer_in(0, INT64_MAX);
    piece.end = value.at("end").integer_in(piece.begin, INT64_MAX);
    piece.crc32c = value.at("crc32c").checksum();
    record.pieces.emplace(key, std::move(piece));
  }
  return record;
}

std::string Manifest::to_text() const {
  Json json = to_json(contents);
  json["format"] = kFormat;
  json["files"] = Json::object();
  for (const auto& [name, record] : files) json["files"][name] = to_json(record);
  return json.dump(1);
}

Manifest Manifest::parse(const std::string& text, const std::string& path) {
  const auto document = parse_json(text, path);
  const JsonReader reader(document, path);
  if (const auto format = reader.at("format").integer(); format != kFormat) {
    fail(path, cat("is of format ", format, "; this version reads format ", kFormat,
                   format > kFormat ? ": take the version of unshard that wrote it, or a later one" : ""));
  }
  Manifest manifest;
  manifest.contents = read_contents(reader, path);
  for (const auto& [name, value] : reader.at("files").members()) {
    if (!is_plain_name(name)) value.fail("is no name of a file in this folder");
    manifest.files.emplace(name, read_file_record(value));
  }
  check_pieces(manifest, path);
  return manifest;
}

Manifest Manifest::read(const std::string& directory) {
  const auto path = directory + "/" + kManifestFile;
  std::error_code ignored;
  if (!std::filesystem::exists(path, ignored))
    fail(directory, cat("holds no ", kManifestFile, ": not a checkpoint, or one that wasn't finished"));
  return parse(read_text(path, kMostManifestBytes), path);
}

}  // namespace unshard::checkpoint
