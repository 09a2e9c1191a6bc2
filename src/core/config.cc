#include "unshard/core/config.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "core/config_internal.h"

namespace unshard {

using config::Entry;
using config::Json;

namespace {

constexpr const char* kReduceBucket = "zero_optimization.reduce_bucket_size";
constexpr const char* kPrefetchBucket = "zero_optimization.prefetch_bucket_size";
constexpr const char* kPersistence = "zero_optimization.param_persistence_threshold";

/// `zero_optimization: true` is stage 1 with the top level's allgather_size, in files of the first ZeRO.
void expand_zero_switch(Json& document) {
  const auto zero = document.find("zero_optimization");
  if (zero == document.end() || !zero->is_boolean()) return;
  const bool on = zero->get<bool>();
  *zero = Json{{"stage", on ? 1 : 0}};
  if (on && document.contains("allgather_size")) (*zero)["allgather_bucket_size"] = document["allgather_size"];
}

void apply_old_offload(Config& config, const config::Checked& checked, std::map<std::string, std::string>& origins) {
  const auto on = [&](const char* path) {
    const Entry* entry = checked.find(path);
    return entry != nullptr && entry->value == true;
  };
  if (on("zero_optimization.cpu_offload")) {
    config.zero.offload_optimizer.device = OffloadDevice::cpu;
    origins["zero_optimization.offload_optimizer.device"] = "derived from cpu_offload";
  }
  if (on("zero_optimization.cpu_offload_param")) {
    config.zero.offload_param.device = OffloadDevice::cpu;
    origins["zero_optimization.offload_param.device"] = "derived from cpu_offload_param";
  }
  if (const Entry* pin = checked.find("zero_optimization.cpu_offload_use_pin_memory")) {
    config.zero.offload_optimizer.pin_memory = config.zero.offload_param.pin_memory = pin->value == true;
    for (const char* which : {"offload_optimizer", "offload_param"})
      origins[cat("zero_optimization.", which, ".pin_memory")] = "derived from cpu_offload_use_pin_memory";
  }
}

/// The environment wins over the file, so that a script can be run unedited.
template <class Origins>
void apply_environment(Config& config, Origins& origins) {
  if (const char* host = std::getenv("UNSHARD_HOST"); host != nullptr && *host != '\0') {
    config.unshard.host = host;
    origins["unshard.host"] = "environment UNSHARD_HOST";
  }
  if (const char* folder = std::getenv("UNSHARD_RUN_DIR"); folder != nullptr && *folder != '\0') {
    config.unshard.run_dir = folder;
    origins["unshard.run_dir"] = "environment UNSHARD_RUN_DIR";
  }
  if (const char* folder = std::getenv("UNSHARD_TIMELINE"); folder != nullptr && *folder != '\0') {
    config.unshard.timeline = folder;
    origins["unshard.timeline"] = "environment UNSHARD_TIMELINE";
  }
  const char* text = std::getenv("UNSHARD_SHARE_MEMORY");
  if (text == nullptr || *text == '\0') return;
  const std::string value = config::lower_case(text);
  if (value != "auto" && value != "off")
    throw ConfigError(
        cat("[config] UNSHARD_SHARE_MEMORY = \"", text, "\" (environment): expected auto or off; it overrides unshard.share_memory"));
  config.unshard.share_memory = value == "auto";
  origins["unshard.share_memory"] = "environment UNSHARD_SHARE_MEMORY";
}

/// Lines about values that were written and don't do what they say.
void note_autos(const config::Checked& checked, std::vector<std::string>& notices) {
  std::string defaults;
  for (const auto& item : checked.autos) {
    const bool from_model = item.path == kReduceBucket || item.path == kPrefetchBucket || item.path == kPersistence;
    if (from_model || config::is_batch_key(item.path) || item.path == "gradient_clipping") continue;
    defaults += cat(defaults.empty() ? "" : ", ", item.path);
  }
  if (!defaults.empty()) notices.push_back(cat("\"auto\" has no framework to fill it in, the default is used: ", defaults));
}

void note_no_ops(const config::Checked& checked, std::vector<std::string>& notices) {
  std::string keys;
  for (const auto& entry : checked.entries) {
    if (entry.key->state != config::State::accepted || entry.section->quiet) continue;
    const bool harmless = entry.path == "zero_allow_untested_optimizer" || entry.path == "zero_optimization.sub_group_size";
    if (harmless || entry.value == Json::parse(entry.key->initial)) continue;
    keys += cat(keys.empty() ? "" : ", ", entry.path, " = ", config::show(entry.value));
  }
  if (!keys.empty()) notices.push_back(cat("accepted, without effect here: ", keys));
}

void note_dotted(const config::Checked& checked, std::vector<std::string>& notices) {
  std::string keys;
  for (const auto& key : checked.dotted) keys += cat(keys.empty() ? "" : ", ", key);
  if (!keys.empty())
    notices.push_back(cat("without effect, as with DeepSpeed: ", keys, "; a path isn't a key: nest them, {\"section\": {\"key\": value}}"));
}

/// Only parameters that are partitioned can be offloaded.
void drop_idle_param_offload(Config& config, std::vector<std::string>& notices) {
  if (config.zero.stage == 3 || config.zero.offload_param.device == OffloadDevice::none) return;
  config.zero.offload_param.device = OffloadDevice::none;
  notices.push_back(cat("zero_optimization.offload_param has no effect at zero_optimization.stage = ", config.zero.stage,
                        ": parameters are partitioned at stage 3 only"));
}

}  // namespace

Config::Config() {
  auto details = std::make_shared<Details>();
  apply_environment(*this, details->origins);
  details->resolved = config::field_values(*this);
  details_ = std::move(details);
}

Config Config::from_file(const std::string& path, const ConfigContext& context) {
  ConfigContext named = context;
  if (named.source == "argument") named.source = path;
  return from_json(config::read_text_file(path), named);
}

Config Config::from_json(std::string_view json, const ConfigContext& context) {
  auto details = std::make_shared<Details>();
  details->source = context.source;
  details->document = config::parse_document(json, context.source);
  expand_zero_switch(details->document);
  details->checked = config::check_document(details->document, context.source);
  const auto& checked = details->checked;

  Config c;
  config::load_fields(c, checked);
  apply_old_offload(c, checked, details->origins);
  config::check_rules(c, checked, context.source);
  drop_idle_param_offload(c, details->notices);

  if (auto notice = config::resolve_batch(c, checked, context); !notice.empty()) details->notices.push_back(std::move(notice));
  for (const char* name : {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"})
    if (checked.find(name) == nullptr) details->origins[name] = "derived";
  if (c.batch.micro_batch_assumed) details->origins["train_micro_batch_size_per_gpu"] = "default";
  for (const char* name : {kReduceBucket, kPrefetchBucket, kPersistence})
    if (checked.is_auto(name)) details->origins[name] = "auto: until the model is known";

  const bool no_clipping_given = checked.find("gradient_clipping") == nullptr;
  if (no_clipping_given && context.deepspeed_defaults) {
    c.gradient_clipping = 1.0;
    c.gradient_clipping_defaulted = true;
    details->origins["gradient_clipping"] = "default of DeepSpeed";
    details->notices.push_back(
        "gradient_clipping isn't configured: gradients are clipped at a global norm of 1.0, DeepSpeed's default; set it to 0 for none");
  } else if (no_clipping_given && checked.is_auto("gradient_clipping")) {
    details->notices.push_back(
        "gradient_clipping = \"auto\" has no framework to fill it in: gradients aren't clipped; write a number to clip");
  }
  apply_environment(c, details->origins);
  note_autos(checked, details->notices);
  note_no_ops(checked, details->notices);
  note_dotted(checked, details->notices);
  details->resolved = config::field_values(c);
  c.details_ = std::move(details);
  return c;
}

std::optional<c10::ScalarType> Config::compute_dtype() const {
  if (param_dtype) return param_dtype;
  if (fp16.enabled) return c10::kHalf;
  if (bf16.enabled) return c10::kBFloat16;
  return std::nullopt;
}

void Config::resolve_auto(std::int64_t hidden_size, std::int64_t largest_numel, std::int64_t total_numel, std::int64_t link_numel) {
  if (!any_auto()) return;
  // Without a hidden size: the side of a square as large as the largest matrix, so that one bucket holds any one matrix.
  const bool estimated = hidden_size <= 0;
  const double h =
      estimated ? std::floor(std::sqrt(static_cast<double>(std::max<std::int64_t>(largest_numel, 1)))) : static_cast<double>(hidden_size);
  const auto bounded = [&](double numel) {
    const double limit = static_cast<double>(total_numel > 0 ? total_numel : INT64_MAX / 2);
    return static_cast<std::int64_t>(std::max(1.0, std::min(numel, limit)));
  };
  auto details = std::make_shared<Details>(*details_);
  const auto choose = [&](bool wanted, const char* path, std::int64_t& member, double of_model, double of_link) {
    if (!wanted) return;
    const bool link = of_link > of_model;
    member = bounded(std::max(of_model, of_link));
    details->resolved[path] = member;
    details->origins[path] = link ? "link" : "model";
    const auto why = link ? cat("the link between hosts (", link_numel, " elements a round trip)")
                          : cat("the model (", estimated ? "estimated " : "", "hidden size ", static_cast<std::int64_t>(h), ")");
    details->notices.push_back(cat(path, " = \"auto\": ", member, " elements, chosen from ", why));
  };
  const auto round_trip = static_cast<double>(link_numel);
  choose(zero.reduce_bucket_auto, kReduceBucket, zero.reduce_bucket_numel, h * h, 4 * round_trip);
  choose(zero.prefetch_bucket_auto, kPrefetchBucket, zero.prefetch_bucket_numel, 0.9 * h * h, 4 * round_trip);
  choose(zero.persistence_threshold_auto, kPersistence, zero.param_persistence_threshold, 10 * h, round_trip);
  details_ = std::move(details);
}

std::vector<std::string> Config::notices() const { return details_->notices; }

std::string Config::to_json() const {
  Json document = details_->document;
  const auto values = config::field_values(*this);
  for (const auto& item : details_->checked.autos) {
    const auto known = values.find(item.path);
    if (known != values.end())
      document[item.written] = known->second;
    else
      document[item.written.parent_pointer()].erase(item.written.back());
  }
  for (const char* path : {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"})
    document[path] = values.at(path);
  if (document.contains("steps_per_print")) document["steps_per_print"] = values.at("steps_per_print");  // infinity isn't JSON
  return document.dump(2, ' ', false, Json::error_handler_t::replace);
}

}  // namespace unshard
