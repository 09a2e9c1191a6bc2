#pragma once
// Text to train on: the bytes of a file or of a directory's text files, and random windows of them.
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace example {

inline std::string read_file(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) throw std::runtime_error("can't read " + path.string());
  std::ostringstream out;
  out << in.rdbuf();
  return std::move(out).str();
}

/// Sources of a Python's standard library, which nearly every machine has; empty when there are none.
inline std::string default_text_path() {
  std::vector<std::string> found;
  for (const char* root : {"/usr/lib", "/usr/local/lib"}) {
    std::error_code ignored;
    for (const auto& entry : std::filesystem::directory_iterator(root, ignored))
      if (entry.path().filename().string().starts_with("python3.") && std::filesystem::exists(entry.path() / "ast.py"))
        found.push_back(entry.path().string());
  }
  return found.empty() ? "" : *std::max_element(found.begin(), found.end());
}

/// One string of at most `limit` bytes: the file, or the directory's own files in the order of their names, those with NUL bytes left out.
inline std::string read_text(const std::string& path, std::size_t limit = std::size_t{32} << 20) {
  if (path.empty()) throw std::runtime_error("no text to train on: give a file or a directory with --text");
  std::vector<std::filesystem::path> files;
  if (std::filesystem::is_directory(path)) {
    for (const auto& entry : std::filesystem::directory_iterator(path))
      if (entry.is_regular_file()) files.push_back(entry.path());
    std::sort(files.begin(), files.end());
  } else {
    files.emplace_back(path);
  }
  std::string text;
  for (const auto& file : files) {
    const auto content = read_file(file);
    if (content.find('\0') == std::string::npos) text += content;
    if (text.size() >= limit) break;
  }
  text.resize(std::min(text.size(), limit));
  return text;
}

/// Random windows of a text; every rank draws its own.
class Windows {
 public:
  Windows(std::string text, std::int64_t length, std::uint64_t seed) : text_(std::move(text)), length_(length), random_(seed) {
    if (text_.size() < static_cast<std::size_t>(length) + 2)
      throw std::runtime_error("the text has " + std::to_string(text_.size()) + " bytes, a window needs " + std::to_string(length + 2));
  }

  /// Tokens and the tokens after them, each [count, length].
  std::pair<torch::Tensor, torch::Tensor> next(std::int64_t count) {
    auto rows = torch::empty({count, length_ + 1}, torch::kLong);
    auto* out = rows.data_ptr<std::int64_t>();
    for (std::int64_t i = 0; i < count; ++i) {
      const auto begin = random_() % (text_.size() - static_cast<std::size_t>(length_));
      for (std::int64_t t = 0; t <= length_; ++t) *out++ = static_cast<unsigned char>(text_[begin + static_cast<std::size_t>(t)]);
    }
    return {rows.narrow(1, 0, length_), rows.narrow(1, 1, length_)};
  }

 private:
  std::string text_;
  std::int64_t length_;
  std::mt19937_64 random_;
};

}  // namespace example
