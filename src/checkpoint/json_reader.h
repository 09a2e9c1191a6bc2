#pragma once
// JSON that somebody else wrote: every value is checked as it is taken, and what is wrong with it is said with its place.
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace unshard::checkpoint {

/// \throws CheckpointError naming the file.
nlohmann::json parse_json(const std::string& text, const std::string& path);

/// Product of `sizes` times `width`; nothing: a negative size, or too many elements.
std::optional<std::int64_t> checked_numel(const std::vector<std::int64_t>& sizes, std::int64_t width = 1);

/// One value of a document. The document must outlive it. All calls throw CheckpointError that names file and place.
class JsonReader {
 public:
  JsonReader(const nlohmann::json& value, std::string path, std::string place = {});

  JsonReader at(const std::string& key) const;
  std::optional<JsonReader> find(const std::string& key) const;  ///< nothing: absent or null
  std::vector<JsonReader> elements() const;
  std::vector<std::pair<std::string, JsonReader>> members() const;

  std::int64_t integer() const;
  std::int64_t integer_in(std::int64_t least, std::int64_t most) const;
  double number() const;
  bool boolean() const;
  std::string text() const;
  std::vector<std::string> texts() const;
  std::vector<std::int64_t> sizes() const;  ///< integers of at least 0
  std::uint32_t checksum() const;           ///< eight hexadecimal digits

  [[noreturn]] void fail(const std::string& what) const;

 private:
  [[noreturn]] void wrong_type(const char* wanted) const;
  const nlohmann::json& value_;
  std::string path_, place_;
};

/// As JsonReader::checksum() reads it.
std::string checksum_text(std::uint32_t checksum);

}  // namespace unshard::checkpoint
