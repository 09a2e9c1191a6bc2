#pragma once
// What the tests of Config look at.
#include <string>
#include <string_view>

#include "unshard/core/config.h"
#include "unshard/core/error.h"

namespace unshard::config_test {

inline std::string error_of(std::string_view json, const ConfigContext& context = {}) {
  try {
    Config::from_json(json, context);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "(no error)";
}

inline std::string row(const Config& config, std::string_view key) {
  for (const auto& line : config.table())
    if (line.key == key) return line.value + " <- " + line.origin;
  return "(no row)";
}

inline std::string joined_notices(const Config& config) {
  std::string all;
  for (const auto& line : config.notices()) all += line + "\n";
  return all;
}

}  // namespace unshard::config_test
