#pragma once
// Values of a model's config.json or GGUF metadata: taken with their type checked, missing and wrong ones named.
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <type_traits>
#include <utility>

#include "unshard/core/error.h"
#include "unshard/inference/engine.h"

namespace unshard::inference {

class Settings {
 public:
  Settings(nlohmann::json values, std::string file, std::string place = {})
      : values_(std::move(values)), file_(std::move(file)), place_(std::move(place)) {}

  bool has(const std::string& key) const { return values_.contains(key) && !values_.at(key).is_null(); }
  Settings section(const std::string& key) const { return {has(key) ? values_.at(key) : nlohmann::json::object(), file_, where(key)}; }
  const nlohmann::json& json() const { return values_; }
  const std::string& file() const { return file_; }

  template <class T>
  T get(const std::string& key) const {
    if (!has(key)) throw ModelError(cat(file_, ": has no '", where(key), "'"));
    try {
      if constexpr (std::is_integral_v<T> && !std::is_same_v<T, bool>) return whole<T>(key);
      return values_.at(key).get<T>();
    } catch (const nlohmann::json::exception&) {
      throw ModelError(cat(file_, ": '", where(key), "' is ", shown(key), ", which isn't what belongs there"));
    }
  }
  template <class T>
  T get(const std::string& key, T otherwise) const {
    return has(key) ? get<T>(key) : otherwise;
  }
  /// A size: at least `least`, at most 2^31.
  std::int64_t size(const std::string& key, std::int64_t least = 1) const { return checked(key, get<std::int64_t>(key), least); }
  std::int64_t size_or(const std::string& key, std::int64_t otherwise, std::int64_t least = 0) const {
    return has(key) ? size(key, least) : otherwise;
  }
  /// \throws ModelError naming the key.
  [[noreturn]] void fail(const std::string& key, const std::string& why) const {
    throw ModelError(cat(file_, ": '", where(key), "' is ", has(key) ? shown(key) : "missing", ": ", why));
  }

 private:
  /// No fraction, and within T: a conversion would cut silently.
  template <class T>
  T whole(const std::string& key) const {
    const auto& value = values_.at(key);
    const bool fits = value.is_number_unsigned() ? std::in_range<T>(value.get<std::uint64_t>())
                                                 : value.is_number_integer() && std::in_range<T>(value.get<std::int64_t>());
    if (!fits) fail(key, cat("a whole number of at most ", std::numeric_limits<T>::max(), " is wanted"));
    return value.get<T>();
  }
  std::string shown(const std::string& key) const {
    return values_.at(key).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace).substr(0, 80);
  }
  std::string where(const std::string& key) const { return place_.empty() ? key : cat(place_, ".", key); }
  std::int64_t checked(const std::string& key, std::int64_t value, std::int64_t least) const {
    if (value < least || value > (std::int64_t{1} << 31)) fail(key, cat("a number from ", least, " up is wanted"));
    return value;
  }
  nlohmann::json values_;
  std::string file_, place_;
};

}  // namespace unshard::inference
