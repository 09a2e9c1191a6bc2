#include "checkpoint/json_reader.h"

#include <array>
#include <charconv>
#include <cmath>
#include <cstdio>

#include "checkpoint/system_file.h"
#include "unshard/core/error.h"

namespace unshard::checkpoint {

using Json = nlohmann::json;

Json parse_json(const std::string& text, const std::string& path) {
  try {
    return Json::parse(text);
  } catch (const Json::exception& error) {
    fail(path, cat("damaged: ", error.what()));
  }
}

std::optional<std::int64_t> checked_numel(const std::vector<std::int64_t>& sizes, std::int64_t width) {
  std::int64_t product = width;
  bool empty = false;
  for (const auto size : sizes) {
    if (size < 0) return std::nullopt;
    empty = empty || size == 0;
    if (size > 0 && __builtin_mul_overflow(product, size, &product)) return std::nullopt;
  }
  return empty ? 0 : product;
}

JsonReader::JsonReader(const Json& value, std::string path, std::string place)
    : value_(value), path_(std::move(path)), place_(std::move(place)) {}

void JsonReader::fail(const std::string& what) const { checkpoint::fail(path_, place_.empty() ? what : cat("'", place_, "' ", what)); }

void JsonReader::wrong_type(const char* wanted) const {
  fail(cat("is ", value_.type_name(), ", ", wanted, " is wanted: damaged or foreign"));
}

std::optional<JsonReader> JsonReader::find(const std::string& key) const {
  if (!value_.is_object()) wrong_type("an object");
  const auto at = value_.find(key);
  if (at == value_.end() || at->is_null()) return std::nullopt;
  return JsonReader(*at, path_, place_.empty() ? key : cat(place_, ".", key));
}

JsonReader JsonReader::at(const std::string& key) const {
  if (auto found = find(key)) return *found;
  fail(cat("has no '", key, "': damaged or foreign"));
}

std::vector<JsonReader> JsonReader::elements() const {
  if (!value_.is_array()) wrong_type("a list");
  std::vector<JsonReader> all;
  all.reserve(value_.size());
  for (std::size_t i = 0; i < value_.size(); ++i) all.emplace_back(value_[i], path_, cat(place_, "[", i, "]"));
  return all;
}

std::vector<std::pair<std::string, JsonReader>> JsonReader::members() const {
  if (!value_.is_object()) wrong_type("an object");
  std::vector<std::pair<std::string, JsonReader>> all;
  all.reserve(value_.size());
  for (const auto& [key, value] : value_.items())
    all.emplace_back(key, JsonReader(value, path_, place_.empty() ? key : cat(place_, ".", key)));
  return all;
}

std::int64_t JsonReader::integer() const {
  if (!value_.is_number_integer()) wrong_type("an integer");
  if (value_.is_number_unsigned() && value_.get<std::uint64_t>() > static_cast<std::uint64_t>(INT64_MAX)) fail("is too large");
  return value_.get<std::int64_t>();
}

std::int64_t JsonReader::integer_in(std::int64_t least, std::int64_t most) const {
  const auto value = integer();
  if (value < least || value > most) fail(cat("is ", value, ", outside ", least, " to ", most));
  return value;
}

double JsonReader::number() const {
  if (!value_.is_number()) wrong_type("a number");
  return value_.get<double>();
}

bool JsonReader::boolean() const {
  if (!value_.is_boolean()) wrong_type("true or false");
  return value_.get<bool>();
}

std::string JsonReader::text() const {
  if (!value_.is_string()) wrong_type("text");
  return value_.get<std::string>();
}

std::vector<std::string> JsonReader::texts() const {
  std::vector<std::string> all;
  for (const auto& element : elements()) all.push_back(element.text());
  return all;
}

std::vector<std::int64_t> JsonReader::sizes() const {
  std::vector<std::int64_t> all;
  for (const auto& element : elements()) all.push_back(element.integer_in(0, INT64_MAX));
  return all;
}

std::uint32_t JsonReader::checksum() const {
  const auto digits = text();
  std::uint32_t value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value, 16);
  if (error != std::errc() || end != digits.data() + digits.size() || digits.size() != 8) fail(cat("is \"", digits, "\", no checksum"));
  return value;
}

std::string checksum_text(std::uint32_t checksum) {
  std::array<char, 9> text{};
  std::snprintf(text.data(), text.size(), "%08x", checksum);
  return text.data();
}

}  // namespace unshard::checkpoint
