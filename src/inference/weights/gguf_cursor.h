#pragma once
// A place in the description of a GGUF file that moves on as values are taken; no step leaves the file.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>

namespace unshard::inference {

class GgufCursor {
 public:
  GgufCursor(std::span<const std::byte> bytes, const std::string& file) : bytes_(bytes), file_(file) {}

  std::size_t place() const { return place_; }
  /// Little-endian, as the machines that this runs on are.
  template <class T>
  T take(const char* what) {
    T value;
    std::memcpy(&value, advance(sizeof(T), what), sizeof(T));
    return value;
  }
  std::string text(const char* what);
  /// A number of things of at least `least_bytes` each, which must fit in what is left of the file.
  std::uint64_t count(const char* what, std::uint64_t least_bytes);
  /// A metadata value: its kind, then itself. Lists of lists go at most a few levels deep.
  nlohmann::json value(const std::string& key);

  /// \throws ModelError naming file and place
  [[noreturn]] void fail(const std::string& what) const;

 private:
  nlohmann::json value_of(std::uint32_t kind, const std::string& key, int depth);
  nlohmann::json list(const std::string& key, int depth);
  const std::byte* advance(std::uint64_t size, const char* what);

  std::span<const std::byte> bytes_;
  const std::string& file_;
  std::size_t place_ = 0;
};

}  // namespace unshard::inference
