// The document against the schema: keys, types, values, what is built.
#include <algorithm>
#include <cmath>
#include <set>

#include "core/config_internal.h"
#include "unshard/core/dtype.h"

namespace unshard::config {
namespace {

std::string quoted_list(const std::vector<std::string_view>& names) {
  std::string out;
  for (std::size_t i = 0; i < names.size(); ++i) out += cat(i == 0 ? "" : i + 1 == names.size() ? " or " : ", ", '"', names[i], '"');
  return out;
}

[[noreturn]] void refuse_unknown(const Section& section, const std::string& path, std::string_view name, std::string_view source) {
  const auto nearest = nearest_names(section, name);
  std::vector<std::string_view> homes = sections_with(name);
  homes.erase(std::remove(homes.begin(), homes.end(), section.path), homes.end());
  const int distance = nearest.empty() ? 1 << 30 : name_distance(name, nearest[0]);
  const bool close = distance <= std::max<int>(2, static_cast<int>(name.size()) / 3);
  std::string hint = close ? cat("did you mean ", quoted_list(nearest), "?") : cat("the nearest key known here is ", quoted_list(nearest));
  if (!homes.empty() && homes.size() <= 3) {
    for (auto& home : homes)
      if (home.empty()) home = "the top level";
    hint = cat("it belongs in ", quoted_list(homes), close ? "; or " + hint : "");
  }
  throw ConfigError(cat("[config] unknown key ", path, " (", source, "); ", hint));
}

/// Does the dotted text lead from the top level to a known key ("zero_optimization.stage")?
bool is_path_of_a_key(std::string_view dotted) {
  const Section* section = find_section("");
  for (std::size_t dot = dotted.find('.'); section != nullptr; dot = dotted.find('.')) {
    const Key* key = find_key(*section, dotted.substr(0, dot));
    if (key == nullptr) return false;
    if (dot == std::string_view::npos) return true;
    if (key->kind == Kind::object) return true;
    section = key->kind == Kind::section ? find_section(join_path(section->path, key->name)) : nullptr;
    dotted.remove_prefix(dot + 1);
  }
  return false;
}

/// Checks one document; collects entries.
class Checker {
 public:
  Checker(std::string source, Checked& out) : source_(std::move(source)), out_(out) {}

  /// \param path     of the section as shown, with real names. \param written where it stands in the document.
  void section(const Section& section, const Json& object, const std::string& path, const Json::json_pointer& written) {
    std::set<const Key*> seen;
    for (const auto& [name, value] : object.items()) {
      const Key* key = find_key(section, name);
      // Libraries (TRL, older accelerate, tutorials) update a dict with "zero_optimization.reduce_bucket_size": DeepSpeed never sees it.
      if (key == nullptr && section.path.empty() && is_path_of_a_key(name)) {
        out_.dotted.push_back(name);
        continue;
      }
      if (key == nullptr) refuse_unknown(section, join_path(path, name), name, source_);
      const std::string shown = join_path(path, key->name);
      if (key->state == State::removed)
        throw ConfigError(cat("[config] ", join_path(path, name), " (", source_, ") was removed (DeepSpeed 0.19.8 refuses it as well); ",
                              key->note.empty() ? "remove it from the configuration" : key->note));
      if (!seen.insert(key).second)
        throw ConfigError(
            cat("[config] ", shown, " is given twice under two spellings (", source_, "), once as ", join_path(path, name), "; keep one"));
      one(section, *key, value, shown, written / name);
    }
    for (const auto& key : section.keys)
      if (key.required && out_.find(join_path(path, key.name)) == nullptr)
        throw ConfigError(cat("[config] ", join_path(path, key.name), " is missing (", source_,
                              "); it has no default and \"auto\" can't be chosen here: give ", accepted_text(key)));
  }

 private:
  void one(const Section& section, const Key& key, const Json& value, const std::string& path, const Json::json_pointer& written) {
    if (value.is_null() && key.initial == "null" && !key.required) return;  // null: as if absent
    switch (key.kind) {
      case Kind::section:
        return nested(key, value, path, schema_path(section, key), written);
      case Kind::section_list: {
        if (!value.is_array()) refuse(path, value, source_, "expected " + accepted_text(key));
        for (std::size_t i = 0; i < value.size(); ++i)
          nested(key, value[i], cat(path, "[", i, "]"), schema_path(section, key) + "[]", written / i);
        return;
      }
      case Kind::named_sections: {
        if (!value.is_object()) refuse(path, value, source_, "expected " + accepted_text(key));
        for (const auto& [name, item] : value.items())
          nested(key, item, join_path(path, name), schema_path(section, key) + ".*", written / name);
        return;
      }
      default:
        break;
    }
    const bool literal = key.initial == "\"auto\"" || key.accepted.find("\"auto\"") != std::string_view::npos;
    if (value == "auto" && !literal) {
      if (key.name == "type")
        refuse(path, value, source_, "a framework fills this in only for numbers; expected the name of a class, or leave it out");
      out_.autos.push_back({path, written});
      return;
    }
    Entry entry{path, &key, &section, value == "auto" ? value : canonical(key, value, path)};
    if (key.state == State::not_built) refuse_if_asked(key, entry.value, path);
    out_.entries.push_back(std::move(entry));
  }

  static std::string schema_path(const Section& section, const Key& key) { return join_path(section.path, key.name); }

  void nested(const Key& key, const Json& value, const std::string& path, const std::string& schema_path,
              const Json::json_pointer& written) {
    if (!value.is_object()) refuse(path, value, source_, "expected an object with keys of its own");
    section(*find_section(schema_path), value, path, written);
    if (key.state == State::not_built) refuse_if_asked(key, value, path);
  }

  void refuse_if_asked(const Key& key, const Json& value, const std::string& path) {
    const Json initial = Json::parse(key.initial);
    if (value == initial) return;
    if (!key.idle.empty())
      for (const auto& idle : Json::parse(key.idle))
        if (value == idle) return;
    throw ConfigError(cat("[config] known, not built yet: ", path, " = ", show(value), " (", source_, "); remove it",
                          initial.is_null() ? "" : cat(" or set it to ", show(initial))));
  }

  [[noreturn]] void wrong(const Key& key, const Json& value, const std::string& path) {
    std::string hint;
    if (value.is_string() &&
        (key.kind == Kind::number || key.kind == Kind::per_group || key.kind == Kind::integer || key.kind == Kind::boolean)) {
      const auto text = lower_case(value.get<std::string>());
      if (Json::accept(text) && !text.starts_with('"')) hint = "; remove the quotation marks";
    }
    refuse(path, value, source_, "expected " + accepted_text(key) + hint);
  }

  Json canonical(const Key& key, const Json& value, const std::string& path) {
    switch (key.kind) {
      case Kind::boolean:
        if (value.is_boolean()) return value;
        break;
      case Kind::integer:
        return integer(key, value, path);
      case Kind::number:
        if (value.is_number() && key.range.contains(value.get<double>())) return value;
        break;
      case Kind::string:
        if (value.is_string()) return value;
        break;
      case Kind::dtype:
        if (value.is_string()) {
          const auto dtype = parse_dtype(value.get<std::string>());
          if (dtype == c10::kFloat || dtype == c10::kBFloat16 || dtype == c10::kHalf) return dtype_name(*dtype);
        }
        break;
      case Kind::choice:
        for (const auto& accepted : Json::parse(key.accepted)) {
          const bool same_text =
              value.is_string() && accepted.is_string() && lower_case(value.get<std::string>()) == lower_case(accepted.get<std::string>());
          if (same_text || value == accepted) return accepted;
        }
        break;
      case Kind::strings:
      case Kind::integers:
      case Kind::numbers:
        return list(key, value, path);
      case Kind::per_group:
        if (value.is_array() && !value.empty()) return list(key, value, path);
        if (value.is_number() && key.range.contains(value.get<double>())) return value;
        break;
      case Kind::list:
        if (value.is_array()) return value;
        break;
      case Kind::object:
        if (value.is_object()) return value;
        break;
      default:
        return value;
    }
    wrong(key, value, path);
  }

  Json integer(const Key& key, const Json& value, const std::string& path) {
    if (key.infinite && value.is_string()) {
      const auto text = lower_case(value.get<std::string>());
      if (text == "infinity" || text == "inf") return "Infinity";
    }
    constexpr double kLimit = 9223372036854775808.0;  // 2^63
    if (value.is_number_float()) {
      const double number = value.get<double>();
      if (std::trunc(number) != number || std::abs(number) >= kLimit || !key.range.contains(number)) wrong(key, value, path);
      return static_cast<std::int64_t>(number);
    }
    if (!value.is_number_integer()) wrong(key, value, path);
    if (value.is_number_unsigned() && value.get<std::uint64_t>() > static_cast<std::uint64_t>(INT64_MAX)) wrong(key, value, path);
    if (!key.range.contains(value.get<double>())) wrong(key, value, path);
    return value;
  }

  Json list(const Key& key, const Json& value, const std::string& path) {
    if (!value.is_array() || (key.length != 0 && value.size() != static_cast<std::size_t>(key.length))) wrong(key, value, path);
    for (const auto& item : value) {
      const bool ok = key.kind == Kind::strings    ? item.is_string()
                      : key.kind == Kind::integers ? item.is_number_integer()
                                                   : item.is_number();
      const bool bounded = key.kind == Kind::numbers || key.kind == Kind::per_group;
      if (!ok || (bounded && !key.range.contains(item.get<double>()))) wrong(key, value, path);
    }
    return value;
  }

  std::string source_;
  Checked& out_;
};

/// Keyword arguments without nulls and autos, in canonical form where the type is known by name.
std::string check_params(const std::string& owner, const Json& document, Checked& out, const std::string& source) {
  const Entry* type = out.find(owner + ".type");
  const Entry* given = out.find(owner + ".params");
  if (given == nullptr && type == nullptr) return "{}";
  const Json params = given != nullptr ? given->value : Json::object();
  const std::string path = owner + ".params";
  if (type == nullptr) {
    if (params.empty()) return "{}";
    throw ConfigError(
        cat("[config] ", path, " is given without ", owner, ".type (", source, "); name the type, or remove the ", owner, " section"));
  }
  const std::string name = type->value.get<std::string>();
  const NamedType* known = find_type(owner, name);
  if (known != nullptr && known->state == State::not_built)
    throw ConfigError(cat("[config] known, not built yet: ", owner, ".type = \"", name, "\" (", source, "); ", known->note));
  if (known != nullptr && known->state == State::removed)
    throw ConfigError(cat("[config] ", owner, ".type = \"", name, "\" (", source, ") was removed; ", known->note));
  if (owner == "optimizer" && params.contains("max_grad_norm"))
    refuse(path + ".max_grad_norm", params["max_grad_norm"], source,
           "clipping is set by the top-level key gradient_clipping: move the value there");

  const Json::json_pointer written = Json::json_pointer("/" + owner + "/params");
  const Section* rows = find_section(path, lower_case(name));
  const bool torch_class = params.contains("torch_adam") && params["torch_adam"] == true;
  Json result = Json::object();
  if (rows == nullptr || torch_class) {
    for (const auto& [key, value] : params.items()) {
      if (value == "auto")
        out.autos.push_back({path + "." + key, written / key});
      else
        result[key] = value;
    }
    return result.dump();
  }
  const std::size_t first = out.entries.size();
  Checker(source, out).section(*rows, params, path, written);
  for (std::size_t i = first; i < out.entries.size(); ++i) result[std::string(out.entries[i].key->name)] = out.entries[i].value;
  return result.dump();
}

}  // namespace

const Entry* Checked::find(std::string_view path) const {
  for (const auto& entry : entries)
    if (entry.path == path) return &entry;
  return nullptr;
}

bool Checked::is_auto(std::string_view path) const {
  return std::any_of(autos.begin(), autos.end(), [&](const Auto& item) { return item.path == path; });
}

void refuse(std::string_view path, const Json& value, std::string_view source, std::string_view what) {
  throw ConfigError(cat("[config] ", path, " = ", show(value), " (", source, "): ", what));
}

Checked check_document(const Json& document, const std::string& source) {
  Checked checked;
  Checker(source, checked).section(*find_section(""), document, "", Json::json_pointer());
  checked.optimizer_params = check_params("optimizer", document, checked, source);
  checked.scheduler_params = check_params("scheduler", document, checked, source);
  return checked;
}

}  // namespace unshard::config
