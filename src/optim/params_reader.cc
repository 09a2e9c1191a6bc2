#include "optim/params_reader.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <nlohmann/json.hpp>

#include "unshard/core/error.h"

namespace unshard {
namespace {

std::string lower(std::string_view text) {
  std::string result(text);
  std::transform(result.begin(), result.end(), result.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return result;
}

std::size_t edit_distance(const std::string& a, const std::string& b) {
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t change = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, change});
    }
  }
  return row[b.size()];
}

}  // namespace

std::string nearest_name(std::string_view word, const std::vector<std::string>& candidates) {
  std::string best;
  std::size_t best_distance = std::max<std::size_t>(2, word.size() / 2) + 1;
  for (const auto& candidate : candidates) {
    const std::size_t distance = edit_distance(lower(word), lower(candidate));
    if (distance < best_distance) {
      best_distance = distance;
      best = candidate;
    }
  }
  return best;
}

struct ParamsReader::Impl {
  std::string where;
  nlohmann::json object;
  std::vector<std::string> known;

  const nlohmann::json* find(const char* key) {
    if (std::find(known.begin(), known.end(), key) == known.end()) known.emplace_back(key);
    const auto it = object.find(key);
    return it == object.end() || it->is_null() ? nullptr : &*it;
  }
};

ParamsReader::ParamsReader(std::string where, const std::string& json) : impl_(std::make_unique<Impl>()) {
  impl_->where = std::move(where);
  impl_->object = nlohmann::json::parse(json.empty() ? "{}" : json, nullptr, false);
  if (impl_->object.is_discarded()) throw ConfigError(cat(impl_->where, ": not JSON: ", json));
  if (impl_->object.is_null()) impl_->object = nlohmann::json::object();
  if (!impl_->object.is_object()) throw ConfigError(cat(impl_->where, ": ", json, " is not a JSON object of keyword arguments"));
}
ParamsReader::~ParamsReader() = default;

void ParamsReader::fail(const char* key, const std::string& reason) const {
  const auto it = impl_->object.find(key);
  throw ConfigError(
      cat(impl_->where, ": \"", key, "\"", it == impl_->object.end() ? std::string(" is missing") : " is " + it->dump(), "; ", reason));
}

void ParamsReader::check(bool ok, const char* key, const std::string& reason) const {
  if (!ok) fail(key, reason);
}

std::optional<double> ParamsReader::number(const char* key) {
  const auto* value = impl_->find(key);
  if (value == nullptr) return std::nullopt;
  if (value->is_string() && *value == "auto") fail(key, "\"auto\" is filled in by Hugging Face's Trainer only; write a number");
  check(value->is_number() && std::isfinite(value->get<double>()), key, "wanted a number");
  return value->get<double>();
}

std::optional<std::int64_t> ParamsReader::integer(const char* key) {
  const auto value = number(key);
  if (!value) return std::nullopt;
  check(*value == std::floor(*value) && std::abs(*value) < 9e15, key, "wanted a whole number");
  return static_cast<std::int64_t>(*value);
}

bool ParamsReader::flag(const char* key, bool fallback) {
  const auto* value = impl_->find(key);
  if (value == nullptr) return fallback;
  check(value->is_boolean(), key, "wanted true or false");
  return value->get<bool>();
}

std::optional<std::string> ParamsReader::text(const char* key) {
  const auto* value = impl_->find(key);
  if (value == nullptr) return std::nullopt;
  check(value->is_string(), key, "wanted a string");
  return value->get<std::string>();
}

std::pair<double, double> ParamsReader::pair(const char* key, std::pair<double, double> fallback) {
  const auto* value = impl_->find(key);
  if (value == nullptr) return fallback;
  check(value->is_array() && value->size() == 2 && (*value)[0].is_number() && (*value)[1].is_number(), key, "wanted two numbers, [a, b]");
  return {(*value)[0].get<double>(), (*value)[1].get<double>()};
}

std::vector<double> ParamsReader::per_group(const char* key, int groups) {
  const auto* value = impl_->find(key);
  if (value == nullptr) return {};
  if (!value->is_array()) return std::vector<double>(static_cast<std::size_t>(groups), *number(key));
  check(value->size() == static_cast<std::size_t>(groups), key,
        cat("a list needs one number for each of the ", groups, " parameter groups of the optimizer"));
  std::vector<double> result;
  for (const auto& entry : *value) {
    check(entry.is_number(), key, "wanted a list of numbers");
    result.push_back(entry.get<double>());
  }
  return result;
}

void ParamsReader::ignore(const char* key) { impl_->find(key); }

void ParamsReader::only(const char* key, bool only, const char* why) {
  if (flag(key, only) != only) fail(key, cat("only ", only ? "true" : "false", " is built: ", why));
}

void ParamsReader::finish() const {
  for (const auto& [key, value] : impl_->object.items()) {
    if (std::find(impl_->known.begin(), impl_->known.end(), key) != impl_->known.end()) continue;
    const std::string near = nearest_name(key, impl_->known);
    std::string all;
    for (const auto& name : impl_->known) all += (all.empty() ? "" : ", ") + name;
    throw ConfigError(
        cat(impl_->where, ": unknown key \"", key, "\"", near.empty() ? "" : "; did you mean \"" + near + "\"?", " Accepted: ", all));
  }
}

}  // namespace unshard
