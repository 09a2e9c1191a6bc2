// Config::table: every resolved key with its value and where it came from.
#include "core/config_internal.h"

namespace unshard {

using config::Entry;
using config::Json;

namespace {

std::string text_of(const Json& value) { return value.is_string() ? value.get<std::string>() : config::show(value); }

class Table {
 public:
  Table(const config::Checked& checked, const config::FieldValues& now, const config::FieldValues& loaded,
        const std::map<std::string, std::string>& origins, const std::string& source)
      : checked_(checked), now_(now), loaded_(loaded), origins_(origins), source_(source) {}

  void section(const config::Section& section) {
    const bool repeated = section.path.find('*') != std::string_view::npos || section.path.find('[') != std::string_view::npos;
    if (!section.types.empty()) return;  // shown with the key that holds them
    if (repeated) {
      for (const auto& entry : checked_.entries)
        if (entry.section == &section) rows_.push_back({entry.path, text_of(entry.value), source_});
      return;
    }
    for (const auto& key : section.keys) one(section, key);
  }

  /// `params` of optimizer or scheduler: what was given, then the type's defaults.
  void params(std::string_view owner, std::string_view type, const std::string& json) {
    const std::string path = cat(owner, ".params");
    const Json given = Json::parse(json);
    for (const auto& [name, value] : given.items()) rows_.push_back({path + "." + name, text_of(value), source_});
    const auto* known = config::find_section(path, config::lower_case(type));
    if (known == nullptr || (given.contains("torch_adam") && given["torch_adam"] == true)) return;
    for (const auto& key : known->keys)
      if (key.state == config::State::built && !given.contains(std::string(key.name)))
        rows_.push_back({config::join_path(path, key.name), text_of(Json::parse(key.initial)), "default"});
  }

  std::vector<ConfigRow> take() { return std::move(rows_); }

 private:
  void one(const config::Section& section, const config::Key& key) {
    const std::string path = config::join_path(section.path, key.name);
    const Entry* entry = checked_.find(path);
    const auto bound = now_.find(path);
    if (path == "optimizer.params" || path == "scheduler.params") return;
    if (bound != now_.end())
      rows_.push_back({path, text_of(bound->second), origin(path, entry != nullptr)});
    else if (entry != nullptr)
      rows_.push_back({path, key.name == "api_key" ? "(hidden)" : text_of(entry->value), source_});
  }

  std::string origin(const std::string& path, bool given) const {
    const auto loaded = loaded_.find(path);
    if (loaded == loaded_.end() || loaded->second != now_.at(path)) return "code";
    const auto special = origins_.find(path);
    if (special != origins_.end()) return special->second;
    return given ? source_ : "default";
  }

  const config::Checked& checked_;
  const config::FieldValues& now_;
  const config::FieldValues& loaded_;
  const std::map<std::string, std::string>& origins_;
  const std::string& source_;
  std::vector<ConfigRow> rows_;
};

}  // namespace

std::vector<ConfigRow> Config::table() const {
  const auto now = config::field_values(*this);
  Table table(details_->checked, now, details_->resolved, details_->origins, details_->source);
  for (const auto& section : config::schema()) {
    table.section(section);
    if (section.path == "optimizer") table.params("optimizer", optimizer.type, optimizer.params_json);
    if (section.path == "scheduler") table.params("scheduler", scheduler.type, scheduler.params_json);
  }
  return table.take();
}

}  // namespace unshard
