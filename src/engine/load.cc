// A training state from any Source into what this rank keeps, whatever world size, stage and dtype it was saved with.
//
// [Note: nothing half loaded] Everything that can be told without changing anything is told first, on all ranks together: names, shapes,
// the optimizer, every file's header, every checksum. Only a disk that fails between that and the reading leaves a mixture; the engine
// then refuses to train or save until a load succeeds.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <map>
#include <set>
#include <utility>

#include "agreement.h"
#include "checkpoint/keep.h"
#include "checkpoint/manifest.h"
#include "checkpoint/system_file.h"
#include "engine_state.h"
#include "flat.h"
#include "save_job.h"
#include "unshard/checkpoint/source.h"
#include "unshard/core/error.h"

namespace unshard {
namespace {

namespace fs = std::filesystem;
using checkpoint::Range;
using checkpoint::SavedParameter;

constexpr std::int64_t kChunkNumel = 8 << 20;        // elements read at once: bounds the memory beside what is filled
constexpr std::int64_t kMostStateBytes = 1LL << 30;  // of state.json

std::string list(const std::vector<std::string>& names) {
  constexpr std::size_t kShown = 8;
  std::string text;
  for (std::size_t i = 0; i < std::min(names.size(), kShown); ++i) text += cat(i ? ", '" : "'", names[i], "'");
  return names.size() > kShown ? cat(text, " and ", names.size() - kShown, " more") : text;
}

// "torch.AdamW", "AdamW" and our "adamw" keep the same states, and so does Adam.
std::string family(const std::string& type) {
  auto name = type.substr(type.find_last_of('.') + 1);
  std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  for (const char* prefix : {"fused", "deepspeedcpu"}) {
    if (name.starts_with(prefix)) name = name.substr(std::string(prefix).size());
  }
  return name == "adamw" ? "adam" : name;
}

}  // namespace

// Which saved parameter fills which of ours. A tied one may go by another of its names on either side.
const SavedParameter* Engine::State::saved_of(const ModelParameter& parameter,
                                              const std::map<std::string, const SavedParameter*>& saved) const {
  const auto find = [&](const std::string& name) {
    const auto at = saved.find(name);
    return at == saved.end() ? nullptr : at->second;
  };
  if (const auto* found = find(parameter.name)) return found;
  for (const auto& [alias, name] : model.shared_names()) {
    if (name != parameter.name) continue;
    if (const auto* found = find(alias)) return found;
  }
  return nullptr;
}

// \throws CheckpointError the saved state can't be this engine's.
LoadPlan Engine::State::plan_load(const checkpoint::Contents& contents, const LoadOptions& load, LoadReport& report) const {
  const auto fail = [&](const auto&... parts) { checkpoint::fail(contents.origin, cat(parts...)); };
  LoadPlan plan;
  plan.with_weights = load.weights;
  std::map<std::string, const SavedParameter*> saved;
  for (const auto& parameter : contents.parameters) saved[parameter.name] = &parameter;
  for (const auto& [alias, name] : contents.shared) saved.emplace(alias, saved.at(name));
  std::set<const SavedParameter*> used;
  for (const auto& parameter : model.parameters()) {
    const auto* found = saved_of(parameter, saved);
    if (!found) {
      report.missing.push_back(parameter.name);
      continue;
    }
    used.insert(found);
    if (found->sizes != parameter.geometry.sizes) {
      fail("'", parameter.name, "' has shape ", at::IntArrayRef(found->sizes), ", the model's is ",
           at::IntArrayRef(parameter.geometry.sizes));
    }
    if (found->excluded) continue;  // left out on demand: the model's own value stays
    if (found->value_kind().empty()) fail("has no values of '", parameter.name, "'");
    plan.parameters.push_back({&parameter, found});
  }
  for (const auto& parameter : contents.parameters) {
    if (!used.contains(&parameter)) report.unexpected.push_back(parameter.name);
  }
  if (load.strict && !report.missing.empty()) {
    fail("has no ", list(report.missing), report.unexpected.empty() ? "" : cat(", but ", list(report.unexpected)),
         "; a non-strict load takes what is there");
  }
  if (load.strict && !report.unexpected.empty()) {
    fail("has ", list(report.unexpected), ", which the model lacks; a non-strict load takes what is there");
  }
  plan.with_optimizer = load.load_optimizer && !load.weights_only && optimizer != nullptr;
  if (plan.with_optimizer) check_optimizer(contents);
  plan.with_groups = plan.with_optimizer && !contents.groups.empty();
  return plan;
}

void Engine::State::check_optimizer(const checkpoint::Contents& contents) const {
  const auto fail = [&](const auto&... parts) {
    checkpoint::fail(contents.origin, cat(parts..., "; to take the weights only, load without the optimizer"));
  };
  const auto type = optimizer->type();
  if (contents.optimizer_type.empty() && contents.optimizer_states.empty()) fail("holds no optimizer, the engine has ", type);
  const auto names = optimizer->state_names();
  const std::set<std::string> own(names.begin(), names.end()), theirs(contents.optimizer_states.begin(), contents.optimizer_states.end());
  const bool same = own.empty() || theirs.empty() ? family(type) == family(contents.optimizer_type) : own == theirs;
  if (!same) {
    fail("was saved with optimizer ", contents.optimizer_type, " (", list({theirs.begin(), theirs.end()}), "), the engine has ", type, " (",
         list({own.begin(), own.end()}), ")");
  }
  if (!contents.groups.empty() && contents.groups.size() != groups.size())
    fail("has ", contents.groups.size(), " parameter groups, the engine ", groups.size());
}

// What this rank keeps of a value: the whole at stage 0, else its piece; all of it where its order in memory isn't row-major.
Range Engine::State::range_of(const ModelParameter& parameter, const std::string& kind, const std::string& name) const {
  const auto& layout = parameter.layout;
  if (keeps_whole() || !parameter.is_row_major()) return {kind, name, 0, layout.numel};
  return {kind, name, layout.begin(comm->rank()), layout.end(comm->rank())};
}

std::vector<Range> Engine::State::ranges_of(const LoadPlan& plan) const {
  std::vector<Range> ranges;
  for (const auto& [parameter, saved] : plan.parameters) {
    if (plan.with_weights) ranges.push_back(range_of(*parameter, saved->value_kind(), saved->name));
    if (!plan.with_optimizer || !parameter->is_trained() || saved->steps == 0) continue;
    for (const auto& kind : saved->kinds) {
      if (kind != checkpoint::kParam && kind != checkpoint::kFp32) ranges.push_back(range_of(*parameter, kind, saved->name));
    }
  }
  return ranges;
}

void Engine::State::fill_domain(const at::Tensor& domain, checkpoint::Source& source, const Range& range, const ModelParameter& parameter) {
  const auto read = [&](const at::Tensor& target) {  // flat; as long as the range
    const bool direct = target.device().is_cpu();
    for (std::int64_t begin = range.begin; begin < range.end; begin += kChunkNumel) {
      const auto end = std::min(range.end, begin + kChunkNumel);
      auto part = flat::slice(target, begin - range.begin, end - begin);
      const Range chunk{range.kind, range.name, begin, end};
      direct ? source.read_into(chunk, part) : static_cast<void>(part.copy_(source.read(chunk)));
    }
  };
  if (parameter.is_row_major()) return read(domain);
  const auto options = at::TensorOptions().dtype(domain.scalar_type());
  auto logical = at::empty({parameter.layout.numel}, options);
  read(logical);
  auto stored = at::empty_strided(parameter.geometry.sizes, parameter.geometry.strides, options);
  stored.copy_(logical.view(parameter.geometry.sizes));
  const auto flat = flat::storage_view(stored);
  domain.copy_(keeps_whole() ? flat : flat::slice(flat, parameter.layout.begin(comm->rank()), parameter.layout.size(comm->rank())));
}

void Engine::State::fill_states(checkpoint::Source& source, const ModelParameter& parameter, const SavedParameter& saved) {
  if (!parameter.is_trained()) return;
  if (saved.steps == 0) {  // as at the start of a training
    if (optimizer->step_count(parameter.id) == 0) return;
    for (const auto& name : optimizer->state_names()) {
      const auto state = state_domain(parameter.id, name);
      if (state.defined()) state.fill_(name == "sum" ? groups[static_cast<std::size_t>(parameter.group)].initial_accumulator : 0);
    }
  }
  for (const auto& kind : saved.kinds) {
    if (kind == checkpoint::kParam || kind == checkpoint::kFp32 || saved.steps == 0) continue;
    const auto state = state_domain(parameter.id, kind);
    if (state.defined()) fill_domain(state, source, range_of(parameter, kind, saved.name), parameter);
  }
  optimizer->set_step_count(parameter.id, saved.steps);
}

void Engine::State::fill_weights(checkpoint::Source& source, const ModelParameter& parameter, const SavedParameter& saved) {
  const auto range = range_of(parameter, saved.value_kind(), saved.name);
  const auto shown = domain(parameter.id);
  if (!masters->has(parameter.id)) return fill_domain(shown, source, range, parameter);
  const auto master = masters->domain(parameter.id);
  fill_domain(master, source, range, parameter);
  flat::copy(shown, master);
}

void Engine::State::fill_values(checkpoint::Source& source, const LoadPlan& plan) {
  if (plan.with_optimizer) optimizer->expect_states(source.contents().optimizer_states);
  for (const auto& [parameter, saved] : plan.parameters) {
    if (plan.with_weights) fill_weights(source, *parameter, *saved);
    if (plan.with_optimizer) fill_states(source, *parameter, *saved);
  }
}

void Engine::State::take_progress(const checkpoint::Contents& saved, const LoadPlan& plan) {
  counters = saved.counters;
  // Boundaries are counted from the first micro-batch: another accumulation begins one afresh.
  if (saved.accumulation_steps != accumulation_steps) counters.micro_steps -= counters.micro_steps % accumulation_steps;
  micro_steps_since_boundary = 0;
  if (plan.with_optimizer && scaler && saved.loss_scaler) scaler->set_state(*saved.loss_scaler);
  if (plan.with_groups) {
    groups = saved.groups;
    if (!saved.initial_groups.empty()) initial_groups = saved.initial_groups;
  } else {
    apply_schedule();
  }
  comm->set_step(counters.global_steps);
  refresh_factor();
}

// `error`: what went wrong on this rank on the way to the source.
LoadReport Engine::State::load_from(checkpoint::Source* source, const std::string& error, const LoadOptions& load) {
  reload();
  LoadReport report;
  LoadPlan plan;
  agree_checkpoint(error, "engine.load");
  attempt("engine.load", [&] {
    plan = plan_load(source->contents(), load, report);
    source->check(ranges_of(plan));
  });
  if (load.verify) attempt("engine.load", [&] { source->verify(comm->rank(), comm->world_size(), plan.with_optimizer); });
  pipeline->discard();
  loss_was_bad = false;
  store->settle();
  half_loaded = true;
  attempt("engine.load, while values were replaced", [&] { fill_values(*source, plan); });
  std::vector<std::uint8_t> changed(static_cast<std::size_t>(store->size()));
  for (const auto& item : plan.parameters) changed[static_cast<std::size_t>(item.parameter->id)] = 1;
  keeps_whole() ? publish(changed) : store->publish(changed);
  if (!load.weights_only) take_progress(source->contents(), plan);
  half_loaded = false;
  report.has_optimizer = plan.with_optimizer;
  set_phase(Phase::idle, "after load");
  return report;
}

void Engine::State::begin_load(const std::string& call) {
  require_alive("load");
  comm->check_all_in(call);
  finish_save();
  set_phase(Phase::collective, "load");
}

LoadReport Engine::load(const std::string& directory, const LoadOptions& options) {
  const at::NoGradGuard no_grad;
  state_->begin_load(cat("load(", directory, ")"));
  std::unique_ptr<checkpoint::Source> source;
  std::string error, text;
  try {
    const auto present = checkpoint::present_of(directory);
    source = checkpoint::open(present);
    const auto path = present + "/" + checkpoint::kStateText;
    if (fs::exists(path)) text = checkpoint::read_text(path, kMostStateBytes);
  } catch (const std::exception& exception) {
    error = exception.what();
  }
  auto report = state_->load_from(source.get(), error, options);
  report.state_json = std::move(text);
  return report;
}

LoadReport Engine::load_from(checkpoint::Source& source, const LoadOptions& options) {
  const at::NoGradGuard no_grad;
  state_->begin_load("load_from");
  return state_->load_from(&source, {}, options);
}

}  // namespace unshard
