#include "unshard/checkpoint/contents.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "checkpoint/manifest.h"
#include "unshard/core/error.h"

namespace unshard::checkpoint {
namespace {

using Json = nlohmann::json;

// Each hyperparameter and its name, said once for both directions.
template <class Group, class F>
void group_fields(Group& group, F&& field) {
  field("lr", group.lr);
  field("beta1", group.beta1);
  field("beta2", group.beta2);
  field("eps", group.eps);
  field("weight_decay", group.weight_decay);
  field("momentum", group.momentum);
  field("dampening", group.dampening);
  field("lr_decay", group.lr_decay);
  field("initial_accumulator", group.initial_accumulator);
  field("nesterov", group.nesterov);
  field("bias_correction", group.bias_correction);
  field("maximize", group.maximize);
  field("min_coeff", group.min_coeff);
  field("max_coeff", group.max_coeff);
  field("eps_inside_sqrt", group.eps_inside_sqrt);
}

template <class C, class F>
void counter_fields(C& counters, F&& field) {
  field("micro_steps", counters.micro_steps);
  field("global_steps", counters.global_steps);
  field("global_samples", counters.global_samples);
  field("skipped_steps", counters.skipped_steps);
  field("applied_updates", counters.applied_updates);
}

Json groups_json(const std::vector<GroupOptions>& groups) {
  Json all = Json::array();
  for (const auto& group : groups) {
    Json json;
    group_fields(group, [&](const char* name, const auto& value) { json[name] = value; });
    all.push_back(std::move(json));
  }
  return all;
}

void read_value(const JsonReader& reader, double& value) { value = reader.number(); }
void read_value(const JsonReader& reader, bool& value) { value = reader.boolean(); }

std::vector<GroupOptions> read_groups(const JsonReader& reader, const char* name) {
  std::vector<GroupOptions> groups;
  const auto list = reader.find(name);
  if (!list) return groups;
  for (const auto& element : list->elements()) {
    GroupOptions group;
    group_fields(group, [&](const char* key, auto& value) {
      if (const auto found = element.find(key)) read_value(*found, value);
    });
    groups.push_back(group);
  }
  return groups;
}

Json parameter_json(const SavedParameter& parameter) {
  Json json = {{"name", parameter.name},   {"shape", parameter.sizes}, {"strides", parameter.strides},
               {"dtype", parameter.dtype}, {"group", parameter.group}, {"steps", parameter.steps}};
  if (parameter.excluded) json["excluded"] = true;
  return json;
}

SavedParameter read_parameter(const JsonReader& reader) {
  SavedParameter parameter;
  parameter.name = reader.at("name").text();
  parameter.sizes = reader.at("shape").sizes();
  if (!checked_numel(parameter.sizes, 8)) reader.at("shape").fail("has more elements than there can be");
  if (const auto strides = reader.find("strides")) parameter.strides = strides->sizes();
  if (const auto dtype = reader.find("dtype")) parameter.dtype = dtype->text();
  if (const auto group = reader.find("group")) parameter.group = static_cast<int>(group->integer_in(-1, INT32_MAX));
  if (const auto steps = reader.find("steps")) parameter.steps = steps->integer_in(0, INT64_MAX);
  if (const auto excluded = reader.find("excluded")) parameter.excluded = excluded->boolean();
  if (const auto kinds = reader.find("kinds")) parameter.kinds = kinds->texts();
  return parameter;
}

LossScaler::State read_scaler(const JsonReader& reader) {
  return {reader.at("scale").number(), reader.at("iteration").integer(), reader.at("last_overflow").integer(),
          static_cast<int>(reader.at("hysteresis_left").integer_in(INT32_MIN, INT32_MAX))};
}

std::string optional_text(const JsonReader& reader, const char* key) {
  const auto found = reader.find(key);
  return found ? found->text() : std::string();
}

}  // namespace

std::int64_t SavedParameter::numel() const { return checked_numel(sizes).value_or(0); }
bool SavedParameter::has(const std::string& kind) const { return std::find(kinds.begin(), kinds.end(), kind) != kinds.end(); }
std::string SavedParameter::value_kind() const { return has(kFp32) ? kFp32 : has(kParam) ? kParam : ""; }

const SavedParameter* Contents::find(const std::string& name) const {
  const auto alias = shared.find(name);
  const auto& wanted = alias == shared.end() ? name : alias->second;
  const auto at = std::find_if(parameters.begin(), parameters.end(), [&](const SavedParameter& p) { return p.name == wanted; });
  return at == parameters.end() ? nullptr : &*at;
}

Json to_json(const Contents& contents) {
  Json json;
  json["unshard_version"] = contents.unshard_version;
  json["torch_version"] = contents.torch_version;
  json["tag"] = contents.tag;
  json["world_size"] = contents.world_size;
  json["stage"] = contents.stage;
  json["optimizer"] = {{"type", contents.optimizer_type}, {"states", contents.optimizer_states}};
  counter_fields(contents.counters, [&](const char* name, std::int64_t value) { json["counters"][name] = value; });
  json["counters"]["accumulation_steps"] = contents.accumulation_steps;
  if (const auto& scaler = contents.loss_scaler) {
    json["loss_scaler"] = {{"scale", scaler->scale},
                           {"iteration", scaler->iteration},
                           {"last_overflow", scaler->last_overflow},
                           {"hysteresis_left", scaler->hysteresis_left}};
  }
  json["groups"] = groups_json(contents.groups);
  json["initial_groups"] = groups_json(contents.initial_groups);
  json["parameters"] = Json::array();
  for (const auto& parameter : contents.parameters) json["parameters"].push_back(parameter_json(parameter));
  json["shared"] = contents.shared;
  return json;
}

Contents read_contents(const JsonReader& reader, std::string origin) {
  Contents contents;
  contents.origin = std::move(origin);
  contents.unshard_version = optional_text(reader, "unshard_version");
  contents.torch_version = optional_text(reader, "torch_version");
  contents.tag = optional_text(reader, "tag");
  if (const auto world = reader.find("world_size")) contents.world_size = static_cast<int>(world->integer_in(1, 1 << 24));
  if (const auto stage = reader.find("stage")) contents.stage = static_cast<int>(stage->integer_in(0, 3));
  if (const auto optimizer = reader.find("optimizer")) {
    contents.optimizer_type = optional_text(*optimizer, "type");
    if (const auto states = optimizer->find("states")) contents.optimizer_states = states->texts();
  }
  if (const auto counters = reader.find("counters")) {
    const auto take = [&](const char* name, std::int64_t& value) {
      if (const auto found = counters->find(name)) value = found->integer_in(0, INT64_MAX);
    };
    counter_fields(contents.counters, take);
    take("accumulation_steps", contents.accumulation_steps);
  }
  if (const auto scaler = reader.find("loss_scaler")) contents.loss_scaler = read_scaler(*scaler);
  contents.groups = read_groups(reader, "groups");
  contents.initial_groups = read_groups(reader, "initial_groups");
  if (contents.initial_groups.size() != contents.groups.size() && !contents.initial_groups.empty())
    reader.at("initial_groups").fail(cat("has ", contents.initial_groups.size(), " groups, 'groups' has ", contents.groups.size()));
  std::set<std::string> names;
  for (const auto& element : reader.at("parameters").elements()) {
    contents.parameters.push_back(read_parameter(element));
    if (!names.insert(contents.parameters.back().name).second) element.fail(cat("is a second '", contents.parameters.back().name, "'"));
  }
  if (const auto shared = reader.find("shared")) {
    for (const auto& [alias, name] : shared->members()) {
      if (!names.contains(name.text())) name.fail(cat("names '", name.text(), "', which isn't a parameter"));
      contents.shared[alias] = name.text();
    }
  }
  return contents;
}

}  // namespace unshard::checkpoint
