#include "core/config_document.h"

#include <cctype>
#include <fstream>
#include <set>
#include <sstream>
#include <vector>

#include "core/config_schema.h"
#include "unshard/core/error.h"

namespace unshard::config {
namespace {

constexpr std::size_t kMaxDepth = 64;  // no configuration is deeper; recursion below stays bounded

/// Turns the dialect into strict JSON of (nearly) the same shape, so that line and column of an error fit the user's text.
class Relaxer {
 public:
  explicit Relaxer(std::string_view text) : in_(text) { out_.reserve(text.size() + 16); }

  std::string run() {
    while (at_ < in_.size()) {
      const char c = in_[at_];
      if (c == '"') {
        copy_string();
      } else if (starts("//") || c == '#') {
        blank_until("\n");
      } else if (starts("/*")) {
        blank_until("*/");
      } else if (std::isspace(static_cast<unsigned char>(c)) != 0) {
        out_ += c;
        ++at_;
      } else if (std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '-' || c == '+') {
        copy_word();
      } else {
        copy_punctuation(c);
      }
    }
    return std::move(out_);
  }

 private:
  bool starts(std::string_view what) const { return in_.substr(at_).starts_with(what); }

  void copy_string() {
    const std::size_t begin = at_++;
    while (at_ < in_.size() && in_[at_] != '"') at_ += in_[at_] == '\\' ? 2 : 1;
    at_ = std::min(at_ + 1, in_.size());
    out_ += in_.substr(begin, at_ - begin);
    mark('"');
  }

  void copy_word() {
    const std::size_t begin = at_;
    const auto inside = [&](char c) {
      return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '-' || c == '+' || c == '.' || c == '_';
    };
    while (at_ < in_.size() && inside(in_[at_])) ++at_;
    const std::string_view word = in_.substr(begin, at_ - begin);
    const std::string lower = lower_case(word);
    if (lower == "inf" || lower == "infinity" || lower == "+inf" || lower == "+infinity")
      out_ += "\"Infinity\"";
    else if (lower == "-inf" || lower == "-infinity")
      out_ += "\"-Infinity\"";
    else if (lower == "nan")
      out_ += "\"NaN\"";
    else
      out_ += word;
    mark('w');
  }

  void copy_punctuation(char c) {
    const bool closes = c == ']' || c == '}';
    if (closes && last_ == ',' && comma_follows_value_) out_[comma_at_] = ' ';
    if (c == ',') {
      comma_at_ = out_.size();
      comma_follows_value_ = last_ == '"' || last_ == 'w' || last_ == ']' || last_ == '}';
    }
    out_ += c;
    ++at_;
    mark(c);
  }

  void blank_until(std::string_view end) {
    const std::size_t stop = in_.find(end, at_);
    if (stop == std::string_view::npos && end == "*/") {  // left for the parser to refuse
      out_ += in_.substr(at_);
      at_ = in_.size();
      return;
    }
    const std::size_t after = stop == std::string_view::npos ? in_.size() : stop + (end == "*/" ? end.size() : 0);
    for (; at_ < after; ++at_) out_ += in_[at_] == '\n' ? '\n' : ' ';
  }

  void mark(char c) { last_ = c; }

  std::string_view in_;
  std::string out_;
  std::size_t at_ = 0, comma_at_ = 0;
  char last_ = 0;  // last significant character; 'w' for a word or number
  bool comma_follows_value_ = false;
};

/// Builds the document and sees what nlohmann's own builder doesn't tell: keys given twice, and depth.
class Builder : public nlohmann::json_sax<Json> {
 public:
  explicit Builder(const std::string& source) : source_(source) {}
  Json take() { return std::move(root_); }

  bool null() override { return add(nullptr); }
  bool boolean(bool value) override { return add(value); }
  bool number_integer(number_integer_t value) override { return add(value); }
  bool number_unsigned(number_unsigned_t value) override { return add(value); }
  bool number_float(number_float_t value, const string_t&) override { return add(value); }
  bool string(string_t& value) override { return add(std::move(value)); }
  bool binary(binary_t&) override { return false; }  // never in text
  bool start_object(std::size_t) override { return open(Json::object()); }
  bool start_array(std::size_t) override { return open(Json::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }

  bool key(string_t& name) override {
    if (stack_.back()->contains(name)) {
      std::string path;
      for (const auto& part : path_) path = join_path(path, part);
      throw ConfigError(cat("[config] ", join_path(path, name), " is given twice (", source_, "); keep one of the two"));
    }
    key_ = name;
    return true;
  }

  bool parse_error(std::size_t, const std::string&, const nlohmann::detail::exception& error) override {
    std::string what = error.what();
    const auto at = what.find("at line");
    if (at != std::string::npos) what = what.substr(at + 3);
    throw ConfigError(cat("[config] ", source_, " isn't valid JSON: ", what, "; comments and trailing commas are allowed, nothing else"));
  }

 private:
  template <class T>
  bool add(T&& value) {
    place(Json(std::forward<T>(value)));
    return true;
  }

  Json* place(Json value) {
    if (stack_.empty()) {
      root_ = std::move(value);
      return &root_;
    }
    Json& parent = *stack_.back();
    if (parent.is_array()) {
      parent.push_back(std::move(value));
      return &parent.back();
    }
    return &(parent[key_] = std::move(value));
  }

  bool open(Json container) {
    if (stack_.size() >= kMaxDepth) throw ConfigError(cat("[config] ", source_, " is nested deeper than ", kMaxDepth, " levels"));
    if (!stack_.empty()) path_.push_back(stack_.back()->is_array() ? cat("[", stack_.back()->size(), "]") : key_);
    stack_.push_back(place(std::move(container)));  // stays valid: nothing is added to the parent until this one is closed
    return true;
  }

  bool close() {
    stack_.pop_back();
    if (!path_.empty()) path_.pop_back();
    return true;
  }

  const std::string& source_;
  Json root_;
  std::vector<Json*> stack_;
  std::vector<std::string> path_;
  std::string key_;
};

}  // namespace

Json parse_document(std::string_view text, const std::string& source) {
  if (text.starts_with("\xEF\xBB\xBF")) text.remove_prefix(3);
  const std::string strict = Relaxer(text).run();
  Builder builder(source);
  Json::sax_parse(strict, &builder);
  Json document = builder.take();
  if (!document.is_object())
    throw ConfigError(cat("[config] ", source, " holds ", document.type_name(), ", not an object; it should begin with { and name keys"));
  return document;
}

std::string read_text_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  if (!file || !(text << file.rdbuf()))
    throw ConfigError(cat("[config] can't read the configuration file ", path, "; check the path, and that it isn't empty or a directory"));
  return text.str();
}

std::string show(const Json& value) {
  std::string text = value.dump(-1, ' ', false, Json::error_handler_t::replace);
  constexpr std::size_t kLongest = 120;
  if (text.size() > kLongest) text = text.substr(0, kLongest) + "...";
  return text;
}

}  // namespace unshard::config
