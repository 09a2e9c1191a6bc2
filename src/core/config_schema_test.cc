// Properties of the schema: every row, not chosen examples.
#include "core/config_schema.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>
#include <set>
#include <sstream>

#include "core/config_internal.h"
#include "unshard/core/config.h"
#include "unshard/core/error.h"

namespace unshard::config {
namespace {

std::string error_of(const std::string& json) {
  try {
    Config::from_json(json);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

/// A document in which `object` stands where `section` says; wildcards become a name, lists get one item.
std::string document_with(const Section& section, const Json& object) {
  Json document = Json::object();
  if (section.path.empty()) return object.dump();
  Json::json_pointer at;
  std::string path(section.path);
  for (std::size_t begin = 0; begin <= path.size();) {
    const std::size_t end = std::min(path.find('.', begin), path.size());
    std::string part = path.substr(begin, end - begin);
    begin = end + 1;
    const bool list = part.ends_with("[]");
    if (list) part = part.substr(0, part.size() - 2);
    at /= part == "*" ? "some_metric" : part;
    if (list) at /= 0;
  }
  document[at] = object;
  if (!section.types.empty()) document[at.parent_pointer()]["type"] = std::string(section.types[0]);
  return document.dump();
}

/// One edit: a letter dropped, doubled, replaced or swapped with its neighbour.
std::string misspell(std::string name, std::mt19937& random) {
  const auto at = static_cast<std::size_t>(random() % name.size());
  switch (random() % 4) {
    case 0:
      return name.erase(at, 1);
    case 1:
      return name.insert(at, 1, name[at]);
    case 2:
      name[at] = static_cast<char>('a' + random() % 26);
      return name;
    default:
      if (at + 1 < name.size()) std::swap(name[at], name[at + 1]);
      return name;
  }
}

TEST(ConfigSchema, EveryMisspeltKeyIsReportedWithItsPathAndTheRightName) {
  std::mt19937 random(7);
  int tried = 0;
  for (const auto& section : schema()) {
    for (const auto& key : section.keys) {
      if (key.state == State::removed) continue;
      auto names = key.aliases;
      names.push_back(key.name);
      for (const auto name : names) {
        for (int repeat = 0; repeat < 3; ++repeat) {
          const std::string wrong = misspell(std::string(name), random);
          if (wrong.empty() || find_key(section, wrong) != nullptr) continue;
          const std::string message = error_of(document_with(section, Json{{wrong, nullptr}}));
          EXPECT_NE(message.find("unknown key "), std::string::npos) << section.path << " " << wrong << ": " << message;
          EXPECT_NE(message.find(wrong + " (argument)"), std::string::npos) << message;
          EXPECT_NE(message.find('"' + std::string(name) + '"'), std::string::npos) << "wanted " << name << ": " << message;
          ++tried;
        }
      }
    }
  }
  EXPECT_GT(tried, 800);
}

TEST(ConfigSchema, ANameOccursOnceInItsSection) {
  for (const auto& section : schema()) {
    std::set<std::string_view> seen;
    for (const auto& key : section.keys) {
      EXPECT_TRUE(seen.insert(key.name).second) << section.path << "." << key.name;
      for (const auto alias : key.aliases) EXPECT_TRUE(seen.insert(alias).second) << section.path << "." << alias;
    }
  }
}

TEST(ConfigSchema, EverySectionKeyHasItsSection) {
  for (const auto& section : schema()) {
    for (const auto& key : section.keys) {
      std::string path = join_path(section.path, key.name);
      if (key.kind == Kind::section_list)
        path += "[]";
      else if (key.kind == Kind::named_sections)
        path += ".*";
      else if (key.kind != Kind::section)
        continue;
      EXPECT_NE(find_section(path), nullptr) << path;
    }
  }
}

TEST(ConfigSchema, EveryDefaultIsAcceptedWhenWritten) {
  for (const auto& section : schema()) {
    for (const auto& key : section.keys) {
      if (key.state == State::removed || key.required) continue;
      Json object{{std::string(key.name), Json::parse(key.initial)}};
      for (const auto& other : section.keys)
        if (other.required) object[std::string(other.name)] = 1;
      if (section.path == "zero_optimization.zenflow") continue;  // its presence asks for something
      EXPECT_EQ(error_of(document_with(section, object)), "") << section.path << "." << key.name;
    }
  }
}

/// A value of the right kind other than the default and the idle ones.
Json asking_value(const Key& key) {
  switch (key.kind) {
    case Kind::boolean:
      return key.initial != "true";
    case Kind::integer:
      return 2;
    case Kind::number:
    case Kind::per_group:
      return 0.5;
    case Kind::strings:
      return Json::array({"z3"});
    default:
      return Json{{"something", 1}};
  }
}

TEST(ConfigSchema, EveryKeyThatIsNotBuiltIsRefusedWhenItAsksForSomething) {
  int tried = 0;
  for (const auto& section : schema()) {
    for (const auto& key : section.keys) {
      if (key.state != State::not_built || key.kind == Kind::section) continue;
      const std::string message = error_of(document_with(section, Json{{std::string(key.name), asking_value(key)}}));
      EXPECT_NE(message.find("known, not built yet: "), std::string::npos) << section.path << "." << key.name << ": " << message;
      EXPECT_NE(message.find(std::string(key.name) + " = "), std::string::npos) << message;
      EXPECT_NE(message.find("remove it"), std::string::npos) << message;
      ++tried;
    }
  }
  EXPECT_GT(tried, 40);
}

TEST(ConfigSchema, EveryRemovedKeyIsRefusedAsRemoved) {
  int tried = 0;
  for (const auto& section : schema()) {
    for (const auto& key : section.keys) {
      if (key.state != State::removed) continue;
      const std::string message = error_of(document_with(section, Json{{std::string(key.name), true}}));
      const bool clipping = key.name == "max_grad_norm" && message.find("gradient_clipping") != std::string::npos;
      EXPECT_TRUE(clipping || message.find("was removed") != std::string::npos) << key.name << ": " << message;
      ++tried;
    }
  }
  EXPECT_GE(tried, 18);
}

TEST(ConfigSchema, EveryKeyRefusesAValueOfTheWrongTypeAndSaysWhatItAccepts) {
  for (const auto& section : schema()) {
    for (const auto& key : section.keys) {
      if (key.state == State::removed || key.kind == Kind::any) continue;
      const Json wrong = key.kind == Kind::object ? Json::array({1}) : Json::array({Json::object()});
      if (key.kind == Kind::list || key.kind == Kind::section_list) continue;
      const std::string message = error_of(document_with(section, Json{{std::string(key.name), wrong}}));
      EXPECT_NE(message.find(join_path("", key.name) + " = "), std::string::npos) << section.path << "." << key.name << ": " << message;
      EXPECT_NE(message.find("expected "), std::string::npos) << message;
      EXPECT_NE(message.find("(argument)"), std::string::npos) << message;
    }
  }
}

TEST(ConfigSchema, DefaultsOfMembersAreTheSchemasDefaults) {
  const auto values = field_values(Config());
  EXPECT_GE(values.size(), 50u);
  for (const auto& [path, value] : values) {
    const auto dot = path.rfind('.');
    const Section* section = find_section(dot == std::string::npos ? "" : path.substr(0, dot));
    ASSERT_NE(section, nullptr) << path;
    const Key* key = find_key(*section, path.substr(dot == std::string::npos ? 0 : dot + 1));
    ASSERT_NE(key, nullptr) << path;
    const Json initial = Json::parse(key->initial);
    const bool derived = is_batch_key(path) || path == "zero_optimization.overlap_comm" || path.ends_with(".type");
    if (!derived) {
      EXPECT_EQ(value, initial) << path;
    }
  }
}

TEST(ConfigSchema, LearningRatesOfSchedulesMayBeGivenForEachParameterGroup) {
  const auto config = Config::from_json(R"({"optimizer": {"type": "Adam"},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": [0, 0.5], "warmup_max_lr": 1}}})");
  const Json params = Json::parse(config.scheduler.params_json);
  EXPECT_EQ(params["warmup_min_lr"], Json::parse("[0, 0.5]"));
  EXPECT_EQ(params["warmup_max_lr"], 1);
}

TEST(ConfigSchema, EditDistanceCountsASwapAsOne) {
  EXPECT_EQ(edit_distance("", ""), 0);
  EXPECT_EQ(edit_distance("", "abc"), 3);
  EXPECT_EQ(edit_distance("stage", "stgae"), 1);
  EXPECT_EQ(edit_distance("stage", "stages"), 1);
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3);
}

TEST(ConfigSchema, NameDistanceCountsAWordAsOne) {
  EXPECT_EQ(name_distance("warmup_steps", "warmup_num_steps"), 1);
  EXPECT_EQ(name_distance("reduce_bucket_size_numel", "reduce_bucket_size"), 1);
  EXPECT_EQ(name_distance("Stage", "stage"), 0);
  EXPECT_EQ(name_distance("size_bucket", "bucket_size"), edit_distance("size_bucket", "bucket_size"));  // order counts
}

TEST(ConfigDocs, DocsConfigIsCurrent) {
  const auto path = std::filesystem::path(__FILE__).parent_path() / "../../docs/config.md";
  const std::string wanted = schema_markdown();
  if (const char* write = std::getenv("UNSHARD_WRITE_DOCS"); write != nullptr && *write == '1') std::ofstream(path) << wanted;
  std::ifstream file(path);
  ASSERT_TRUE(file) << path << " isn't there; run this in the build folder, with UNSHARD_WRITE_DOCS=1 to write it";
  std::ostringstream text;
  text << file.rdbuf();
  EXPECT_TRUE(text.str() == wanted) << "docs/config.md is out of date; write it anew with UNSHARD_WRITE_DOCS=1";
}

}  // namespace
}  // namespace unshard::config
