#pragma once
// Model files for tests: written to a folder that goes away, and damaged in every way that chance finds.
#include <gtest/gtest.h>
#include <stdlib.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>

#include "inference/weights/weight_source.h"
#include "unshard/inference/engine.h"

namespace unshard::inference::testing {

class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "unshard-weights-XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("no temporary folder");
    path_ = pattern;
  }
  ~TemporaryFolder() { std::filesystem::remove_all(path_); }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  const std::string& path() const { return path_; }
  std::string write(const std::string& name, const std::string& bytes) const {
    const std::string path = path_ + "/" + name;
    std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
    return path;
  }

 private:
  std::string path_;
};

template <class T>
std::string bytes_of(T value) {
  std::string bytes(sizeof(T), '\0');
  std::memcpy(bytes.data(), &value, sizeof(T));
  return bytes;
}

/// What ModelError says of `open()`; empty: it didn't throw.
template <class F>
std::string error_of(F&& open) {
  try {
    open();
  } catch (const ModelError& error) {
    return error.what();
  }
  return {};
}

/// One to three of: a byte changed, a bit flipped, eight bytes made huge, the end cut off, bytes added.
inline std::string damage(std::string bytes, std::size_t header, std::mt19937& random) {
  const auto below = [&](std::size_t n) { return static_cast<std::size_t>(random()) % n; };
  for (std::size_t changes = 1 + below(3); changes > 0 && !bytes.empty(); --changes) {
    const std::size_t at = below(std::min(header, bytes.size()));
    switch (below(5)) {
      case 0:
        bytes[at] = static_cast<char>(random());
        break;
      case 1:
        bytes[at] = static_cast<char>(bytes[at] ^ (1 << below(8)));
        break;
      case 2:
        for (std::size_t i = at; i < std::min(at + 8, bytes.size()); ++i) bytes[i] = static_cast<char>(random() % 2 ? 0xff : random());
        break;
      case 3:
        bytes.resize(below(bytes.size()));
        break;
      default:
        bytes.insert(at, 1 + below(9), static_cast<char>(random()));
    }
  }
  return bytes;
}

/// Every tensor that can be used lies in `file`; all its bytes can be read.
inline void read_all(const WeightSource& source, std::span<const std::byte> file) {
  unsigned sum = 0;
  for (const auto& name : source.names()) {
    const WeightView* view = nullptr;
    const std::string error = error_of([&] { view = source.find(name); });
    if (view == nullptr) {
      ASSERT_FALSE(error.empty());
      continue;
    }
    const auto* begin = static_cast<const std::byte*>(view->data);
    const auto size = static_cast<std::size_t>(view->rows * view->row_bytes());
    ASSERT_EQ(checked_product(source.shape(name)), view->rows * view->cols);
    const bool mapped = begin >= file.data() && begin < file.data() + file.size();  // else: a copy, moved to an even address
    ASSERT_TRUE(!mapped || size <= static_cast<std::size_t>(file.data() + file.size() - begin));
    for (std::size_t i = 0; i < size; ++i) sum += static_cast<unsigned>(begin[i]);
  }
  ASSERT_GE(sum, 0U);
}

}  // namespace unshard::inference::testing
