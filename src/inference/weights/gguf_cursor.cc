#include "inference/weights/gguf_cursor.h"

#include <nlohmann/json.hpp>

#include "inference/weights/mapped_file.h"
#include "unshard/core/error.h"

namespace unshard::inference {
namespace {

enum Kind : std::uint32_t { u8, i8, u16, i16, u32, i32, f32, boolean, text_kind, list_kind, u64, i64, f64, kinds };

/// Bytes that a value of this kind takes at least.
constexpr std::uint64_t kLeastBytes[kinds] = {1, 1, 2, 2, 4, 4, 4, 1, 8, 12, 8, 8, 8};
constexpr int kDepth = 4;

}  // namespace

void GgufCursor::fail(const std::string& what) const { fail_file(file_, cat("at byte ", place_, ": ", what)); }

const std::byte* GgufCursor::advance(std::uint64_t size, const char* what) {
  if (size > bytes_.size() - place_) fail(cat("the file ends within ", what, ": cut short or damaged"));
  const std::byte* at = bytes_.data() + place_;
  place_ += size;
  return at;
}

std::string GgufCursor::text(const char* what) {
  const auto size = take<std::uint64_t>(what);
  return {reinterpret_cast<const char*>(advance(size, what)), size};
}

std::uint64_t GgufCursor::count(const char* what, std::uint64_t least_bytes) {
  const auto count = take<std::uint64_t>(what);
  const std::uint64_t left = bytes_.size() - place_;
  if (count > left / least_bytes) fail(cat(count, " as ", what, ", which ", left, " bytes can't hold: damaged"));
  return count;
}

nlohmann::json GgufCursor::value(const std::string& key) { return value_of(take<std::uint32_t>("a kind"), key, 0); }

nlohmann::json GgufCursor::list(const std::string& key, int depth) {
  const auto kind = take<std::uint32_t>("a list's kind");
  if (kind >= kinds) fail(cat("'", key, "' is a list of unknown kind ", kind, ": damaged or newer than this reader"));
  if (depth >= kDepth) fail(cat("'", key, "' is a list of lists more than ", kDepth, " deep: damaged"));
  const std::uint64_t size = count("a list's length", kLeastBytes[kind]);
  auto all = nlohmann::json::array();
  all.get_ref<nlohmann::json::array_t&>().reserve(size);
  for (std::uint64_t i = 0; i < size; ++i) all.push_back(value_of(kind, key, depth + 1));
  return all;
}

nlohmann::json GgufCursor::value_of(std::uint32_t kind, const std::string& key, int depth) {
  switch (kind) {
    case u8:
      return take<std::uint8_t>("a value");
    case i8:
      return take<std::int8_t>("a value");
    case u16:
      return take<std::uint16_t>("a value");
    case i16:
      return take<std::int16_t>("a value");
    case u32:
      return take<std::uint32_t>("a value");
    case i32:
      return take<std::int32_t>("a value");
    case f32:
      return take<float>("a value");
    case boolean: {
      const auto byte = take<std::uint8_t>("a value");
      if (byte > 1) fail(cat("'", key, "' is neither true nor false but ", int{byte}, ": damaged"));
      return byte == 1;
    }
    case text_kind:
      return text("a text");
    case list_kind:
      return list(key, depth);
    case u64:
      return take<std::uint64_t>("a value");
    case i64:
      return take<std::int64_t>("a value");
    case f64:
      return take<double>("a value");
    default:
      fail(cat("'", key, "' is of unknown kind ", kind, ": damaged or newer than this reader"));
  }
}

}  // namespace unshard::inference
