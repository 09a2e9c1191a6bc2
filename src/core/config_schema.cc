#include "core/config_schema.h"

#include <algorithm>
#include <cctype>
#include <sstream>
#include <utility>

namespace unshard::config {

const std::vector<Section>& schema() {
  static const std::vector<Section> all = [] {
    std::vector<Section> sections;
    for (auto part :
         {general_sections(), optimizer_sections(), zero_sections(), storage_sections(), parallel_sections(), observe_sections()})
      sections.insert(sections.end(), part.begin(), part.end());
    return sections;
  }();
  return all;
}

const Section* find_section(std::string_view path, std::string_view type) {
  for (const auto& section : schema()) {
    if (section.path != path) continue;
    if (section.types.empty() ? type.empty() : std::find(section.types.begin(), section.types.end(), type) != section.types.end())
      return &section;
  }
  return nullptr;
}

const Key* find_key(const Section& section, std::string_view name) {
  for (const auto& key : section.keys)
    if (key.name == name || std::find(key.aliases.begin(), key.aliases.end(), name) != key.aliases.end()) return &key;
  return nullptr;
}

int edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::vector<int>> cost(a.size() + 1, std::vector<int>(b.size() + 1));
  for (std::size_t i = 0; i <= a.size(); ++i) cost[i][0] = static_cast<int>(i);
  for (std::size_t j = 0; j <= b.size(); ++j) cost[0][j] = static_cast<int>(j);
  for (std::size_t i = 1; i <= a.size(); ++i) {
    for (std::size_t j = 1; j <= b.size(); ++j) {
      int best = std::min({cost[i - 1][j] + 1, cost[i][j - 1] + 1, cost[i - 1][j - 1] + (a[i - 1] != b[j - 1] ? 1 : 0)});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) best = std::min(best, cost[i - 2][j - 2] + 1);
      cost[i][j] = best;
    }
  }
  return cost[a.size()][b.size()];
}

namespace {

std::vector<std::string_view> words_of(std::string_view name) {
  std::vector<std::string_view> words;
  for (std::size_t begin = 0; begin <= name.size();) {
    const std::size_t end = std::min(name.find('_', begin), name.size());
    words.push_back(name.substr(begin, end - begin));
    begin = end + 1;
  }
  return words;
}

/// Words of `longer` that must go so that `shorter` remains; -1: something else remains.
int words_added(const std::vector<std::string_view>& shorter, const std::vector<std::string_view>& longer) {
  std::size_t matched = 0;
  for (const auto word : longer)
    if (matched < shorter.size() && shorter[matched] == word) ++matched;
  return matched == shorter.size() ? static_cast<int>(longer.size() - shorter.size()) : -1;
}

}  // namespace

int name_distance(std::string_view a, std::string_view b) {
  const std::string x = lower_case(a), y = lower_case(b);
  const int letters = edit_distance(x, y);
  const auto first = words_of(x), second = words_of(y);
  const int words = first.size() < second.size() ? words_added(first, second) : words_added(second, first);
  return words < 0 ? letters : std::min(letters, words);
}

std::vector<std::string_view> nearest_names(const Section& section, std::string_view misspelt) {
  std::vector<std::string_view> nearest;
  int best = 1 << 30;
  const auto consider = [&](std::string_view name) {
    const int distance = name_distance(misspelt, name);
    if (distance < best) nearest.clear();
    best = std::min(best, distance);
    if (distance == best) nearest.push_back(name);
  };
  for (const auto& key : section.keys) {
    if (key.state == State::removed) continue;
    consider(key.name);
    for (const auto alias : key.aliases) consider(alias);
  }
  return nearest;
}

std::vector<std::string_view> sections_with(std::string_view name) {
  std::vector<std::string_view> paths;
  for (const auto& section : schema()) {
    const Key* key = find_key(section, name);
    if (key != nullptr && key->state != State::removed && std::find(paths.begin(), paths.end(), section.path) == paths.end())
      paths.push_back(section.path);
  }
  return paths;
}

std::string join_path(std::string_view parent, std::string_view name) {
  if (parent.empty()) return std::string(name);
  return std::string(parent) + (name.starts_with('[') ? "" : ".") + std::string(name);
}

std::string lower_case(std::string_view text) {
  std::string lower(text);
  std::transform(lower.begin(), lower.end(), lower.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return lower;
}

namespace {

std::string range_text(const Range& range) {
  std::ostringstream out;
  const bool below = range.min != -std::numeric_limits<double>::infinity(), above = range.max != std::numeric_limits<double>::infinity();
  out.precision(17);
  if (below && above && !range.open_min && !range.open_max) {
    out << " from " << range.min << " to " << range.max;
  } else {
    if (below) out << (range.open_min ? " greater than " : " of at least ") << range.min;
    if (below && above) out << " and";
    if (above) out << (range.open_max ? " less than " : " at most ") << range.max;
  }
  return out.str();
}

std::string_view state_text(State state) {
  switch (state) {
    case State::built:
      return "built";
    case State::accepted:
      return "accepted, no effect";
    case State::not_built:
      return "not built yet";
    case State::removed:
      return "removed";
  }
  return "";
}

/// `|` would end a cell.
std::string cell(std::string_view text) {
  std::string out;
  for (const char c : text) out += c == '|' ? std::string("\\|") : std::string(1, c);
  return out;
}

}  // namespace

std::string accepted_text(const Key& key) {
  const auto kind = [&]() -> std::string {
    switch (key.kind) {
      case Kind::boolean:
        return "true or false";
      case Kind::integer:
        return "an integer" + range_text(key.range) + (key.infinite ? ", or infinity" : "");
      case Kind::number:
        return "a number" + range_text(key.range);
      case Kind::string:
        return "a string";
      case Kind::dtype:
        return "fp32, bf16 or fp16";
      case Kind::choice:
        return "one of " + std::string(key.accepted.substr(1, key.accepted.size() - 2));
      case Kind::strings:
        return "a list of strings";
      case Kind::integers:
        return "a list of integers";
      case Kind::numbers:
        return (key.length != 0 ? "a list of " + std::to_string(key.length) + " numbers" : "a list of numbers") +
               (range_text(key.range).empty() ? "" : ", each" + range_text(key.range));
      case Kind::per_group:
        return "a number" + range_text(key.range) + ", or a list with one for each parameter group";
      case Kind::list:
        return "a list";
      case Kind::object:
        return "an object";
      case Kind::any:
        return "any value";
      case Kind::section:
        return "an object";
      case Kind::section_list:
        return "a list of objects";
      case Kind::named_sections:
        return "an object of named objects";
    }
    return "";
  };
  return kind() + (key.initial == "\"auto\"" && key.kind != Kind::choice ? ", or \"auto\"" : "");
}

std::string schema_markdown() {
  std::ostringstream out;
  out << "# The configuration, key by key\n\n"
         "Generated from the schema in `src/core/config_schema_*.cc`; `UNSHARD_WRITE_DOCS=1 bin/unshard_core_test "
         "--gtest_filter='ConfigDocs.*'` in `build/`\n"
         "writes it anew, and the same test fails when it is out of date.\n\n"
         "The file is DeepSpeed's JSON. Comments, trailing commas and integers written as `5e8` are allowed. A key given twice, a key that "
         "isn't\n"
         "listed here, a wrong type or a value out of range is an error that names the key, the value, where it came from and what is "
         "accepted.\n"
         "`\"auto\"` means: as if absent for the batch sizes; chosen from model and link where the table says so; otherwise the default, "
         "with a "
         "notice.\n\n"
         "States: *built* has its effect; *accepted, no effect* is checked and changes nothing here (said once at start when the value "
         "differs\n"
         "from the default); *not built yet* accepts the default and other values that ask for nothing, and refuses the rest; *removed* is "
         "refused,\n"
         "as DeepSpeed 0.19.8 does.\n";
  for (const auto& section : schema()) {
    out << "\n## " << (section.path.empty() ? "Top level" : cell(section.path));
    if (!section.types.empty()) {
      out << " of type";
      for (const auto type : section.types) out << (type == section.types[0] ? " " : ", ") << type;
    }
    out << "\n\n| key | accepts | default | state | notes |\n| --- | --- | --- | --- | --- |\n";
    for (const auto& key : section.keys) {
      out << "| `" << key.name << "`";
      for (const auto alias : key.aliases) out << " or `" << alias << "`";
      const bool removed = key.state == State::removed, nested = key.kind == Kind::section;
      out << " | " << (removed ? "" : cell(accepted_text(key))) << " | ";
      if (!removed && !nested) out << (key.required ? "required" : "`" + cell(key.initial) + "`");
      out << " | " << (nested && key.state == State::built ? "see below" : state_text(key.state)) << " | " << cell(key.note) << " |\n";
    }
  }
  return out.str();
}

}  // namespace unshard::config
