#pragma once
// What the parts of Config share: the checked entries of a document, and the steps from text to Config.
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "core/config_document.h"
#include "core/config_schema.h"
#include "unshard/core/config.h"
#include "unshard/core/error.h"

namespace unshard::config {

/// A value the user wrote, checked and in canonical form (aliases resolved, 5e8 an integer, dtypes and choices in one spelling).
struct Entry {
  std::string path;  ///< canonical: zero_optimization.prefetch_bucket_size
  const Key* key = nullptr;
  const Section* section = nullptr;
  Json value;
};

/// A value written as "auto" that isn't meant literally.
struct Auto {
  std::string path;            ///< canonical
  Json::json_pointer written;  ///< where it stands in the document
};

/// The document after checking against the schema.
struct Checked {
  std::vector<Entry> entries;  ///< in the document's order
  std::vector<Auto> autos;
  std::vector<std::string> dotted;  ///< keys of the top level that spell a path; they have no effect
  std::string optimizer_params = "{}", scheduler_params = "{}";
  const Entry* find(std::string_view path) const;
  bool is_auto(std::string_view path) const;
};

/// \throws ConfigError  unknown, removed or misplaced key; wrong type or value; known but not built yet.
Checked check_document(const Json& document, const std::string& source);

/// `[config] zero_optimization.stage = 7 (ds.json): ` + what.
[[noreturn]] void refuse(std::string_view path, const Json& value, std::string_view source, std::string_view what);

using FieldValues = std::map<std::string, Json, std::less<>>;
/// Set the members of `config` that have an entry.
void load_fields(Config& config, const Checked& checked);
/// The value of every key that is a member of Config, by canonical path.
FieldValues field_values(const Config& config);

/// Rules between keys. \throws ConfigError
void check_rules(const Config& config, const Checked& checked, const std::string& source);

/// Derive the batch triple. \return a notice, or "".
/// \throws ConfigError  with the equation, all numbers and where they come from, and a way out.
std::string resolve_batch(Config& config, const Checked& checked, const ConfigContext& context);

/// Is this one of the three batch keys?
bool is_batch_key(std::string_view path);

}  // namespace unshard::config

namespace unshard {

/// What a Config keeps beside its members.
struct Config::Details {
  config::Json document = config::Json::object();
  config::Checked checked;
  config::FieldValues resolved;                ///< members at the end of loading, to see what code changed since
  std::map<std::string, std::string> origins;  ///< of keys that aren't simply given or default
  std::vector<std::string> notices;
  std::string source = "argument";
};

}  // namespace unshard
