#pragma once
// Keyword arguments of an optimizer or schedule, read from JSON with errors that name key, value and what is accepted.
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace unshard {

/// The candidate nearest to `word` by edit distance, ignoring case; empty when none is near.
std::string nearest_name(std::string_view word, const std::vector<std::string>& candidates);

/// Reads keys one by one; finish() then refuses what was not read.
class ParamsReader {
 public:
  /// \param where  "optimizer.params of AdamW": begins every message. \throws ConfigError  not JSON, or not an object.
  ParamsReader(std::string where, const std::string& json);
  ~ParamsReader();

  /// A finite number; null counts as absent.
  std::optional<double> number(const char* key);
  double number(const char* key, double fallback) { return number(key).value_or(fallback); }
  std::optional<std::int64_t> integer(const char* key);
  bool flag(const char* key, bool fallback);
  std::optional<std::string> text(const char* key);
  /// Two numbers, [a, b].
  std::pair<double, double> pair(const char* key, std::pair<double, double> fallback);
  /// One number for all groups or a list of one each; empty when absent.
  std::vector<double> per_group(const char* key, int groups);
  /// Accepted and without meaning here.
  void ignore(const char* key);
  /// A flag that asks for something not built: \throws ConfigError  when it differs from `only`.
  void only(const char* key, bool only, const char* why);

  /// \throws ConfigError "where.key: value is ...".
  [[noreturn]] void fail(const char* key, const std::string& reason) const;
  void check(bool ok, const char* key, const std::string& reason) const;
  /// \throws ConfigError  a key nobody asked for, with the nearest right one.
  void finish() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace unshard
