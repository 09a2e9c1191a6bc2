// The whole training state to a folder: one tensor file a rank with its own pieces, and a manifest. See [Note: complete or absent] in
// checkpoint/commit.h.
#include <ATen/core/grad_mode.h>
#include <torch/version.h>

#include <filesystem>
#include <functional>
#include <utility>

#include "agreement.h"
#include "checkpoint/system_file.h"
#include "engine_state.h"
#include "flat.h"
#include "save_job.h"
#include "unshard/core/dtype.h"
#include "unshard/core/error.h"
#include "unshard/core/log.h"

namespace unshard {
namespace {

namespace fs = std::filesystem;

fs::path folder_path(const std::string& text) {
  auto path = fs::absolute(fs::path(text)).lexically_normal();
  return path.has_filename() ? path : path.parent_path();  // it ended in /
}

}  // namespace

// \throws CheckpointError on all ranks when one has an error with its file. \throws CommError a rank is lost meanwhile.
void Engine::State::agree_checkpoint(const std::string& error, const char* where) {
  if (const auto agreed = agree_on_error(*comm, error, where); !agreed.empty()) throw CheckpointError(agreed);
}

void Engine::State::attempt(const char* where, const std::function<void()>& work) {
  std::string error;
  try {
    work();
  } catch (const CommError&) {
    throw;  // a rank is lost: that is no error of the file's
  } catch (const std::exception& exception) {
    error = exception.what();
    if (error.empty()) error = "an error without text";
  }
  agree_checkpoint(error, where);
}

// Flat in storage order -> elements in row-major order, where that is another one: then the whole value is needed (collective).
at::Tensor Engine::State::logical_piece(const at::Tensor& piece, const ModelParameter& parameter, const std::string& kind) {
  if (parameter.is_row_major()) return piece;
  const auto whole = shaped(gather_pieces(piece, parameter, kind.c_str()), parameter).contiguous().view(-1);
  return flat::slice(whole, parameter.layout.begin(comm->rank()), parameter.layout.size(comm->rank())).clone();
}

std::vector<PieceToSave> Engine::State::pieces_to_save(bool exclude_frozen) {
  std::vector<PieceToSave> pieces;
  const int rank = comm->rank();
  for (const auto& parameter : model.parameters()) {
    if (exclude_frozen && !parameter.tensor.requires_grad()) continue;
    const auto& layout = parameter.layout;
    const auto add = [&](const std::string& kind, const at::Tensor& value) {
      const auto flat = logical_piece(value, parameter, kind);
      if (flat.numel() != layout.size(rank)) {
        throw CheckpointError(cat("[engine.save] '", kind, "' of '", parameter.name, "' has ", flat.numel(),
                                  " elements where this rank has ", layout.size(rank),
                                  "; only states with a value for each element can be saved"));
      }
      if (flat.numel() == 0 && !(layout.numel == 0 && rank == 0)) return;  // padding
      pieces.push_back({kind + "." + parameter.name, {parameter.name, kind, layout.begin(rank), layout.end(rank)}, flat});
    };
    if (masters->has(parameter.id)) {
      add(checkpoint::kFp32, masters->piece(parameter.id));
    } else {
      add(checkpoint::kParam, piece(parameter.id));
    }
    if (!optimizer || !parameter.is_trained() || optimizer->step_count(parameter.id) == 0) continue;
    for (const auto& name : optimizer->state_names()) {
      if (const auto state = state_domain(parameter.id, name); state.defined()) add(name, own_part(state, parameter));
    }
  }
  return pieces;
}

// What every rank knows alike.
checkpoint::Contents Engine::State::contents(const SaveOptions& save) const {
  checkpoint::Contents contents;
  contents.unshard_version = UNSHARD_VERSION;
  contents.torch_version = TORCH_VERSION;
  contents.world_size = comm->world_size();
  contents.stage = config.zero.stage;
  contents.counters = counters;
  contents.counters.micro_steps -= micro_steps_since_boundary;  // [Note: saves within an accumulation]
  contents.accumulation_steps = accumulation_steps;
  contents.groups = groups;
  contents.initial_groups = initial_groups;
  if (scaler) contents.loss_scaler = scaler->state();
  if (optimizer) {
    contents.optimizer_type = optimizer->type();
    contents.optimizer_states = optimizer->state_names();
  }
  for (const auto& parameter : model.parameters()) {
    checkpoint::SavedParameter saved;
    saved.name = parameter.name;
    saved.sizes = parameter.geometry.sizes;
    saved.strides = parameter.geometry.strides;
    saved.dtype = dtype_name(parameter.dtype);
    saved.group = parameter.tensor.requires_grad() ? parameter.group : -1;  // now: it may have been frozen, or no longer be
    saved.steps = optimizer && parameter.is_trained() ? optimizer->step_count(parameter.id) : 0;
    saved.excluded = save.exclude_frozen && !parameter.tensor.requires_grad();
    contents.parameters.push_back(std::move(saved));
  }
  contents.shared = model.shared_names();
  for (const auto& [alias, name] : save.shared) {
    if (const auto* parameter = model.find(name); parameter && parameter->name != alias) contents.shared[alias] = parameter->name;
  }
  return contents;
}

SaveJob Engine::State::make_save_job(const std::string& directory, const SaveOptions& save) {
  SaveJob job;
  job.directory = directory;
  job.rank = comm->rank();
  job.pieces = pieces_to_save(save.exclude_frozen);
  if (job.rank != 0) return job;
  job.manifest.contents = contents(save);
  job.manifest.contents.tag = fs::path(directory).filename().string();
  job.commit.write_latest = save.write_latest;
  if (!save.latest_in.empty()) job.commit.latest_in = folder_path(save.latest_in).string();
  job.commit.keep = save.keep.value_or(config.checkpoint.keep);
  job.state_json = save.state_json;
  job.state_tensors = save.state_tensors;
  return job;
}

// [Note: saves within an accumulation] Scripts save every so many micro-batches. What they get is the state after the last update: weights
// change only there, gathered gradients aren't written and stay as they are in this engine, and the micro-batches since aren't counted, so
// that a run which loads it begins a whole accumulation.
void Engine::save(const std::string& directory, const SaveOptions& options) {
  auto& s = *state_;
  s.require_alive("save");
  require(!s.half_loaded, "[engine.save] the last load() failed while values were being replaced; load a checkpoint first");
  const at::NoGradGuard no_grad;
  s.comm->check_all_in(cat("save(", directory, ")"));
  s.finish_save();
  if (s.comm->rank() == 0 && s.micro_steps_since_boundary != 0 && !s.told_of_save_within) {
    s.told_of_save_within = true;
    log_warning(0, cat("save: called within an accumulation, after ", s.micro_steps_since_boundary, " of its micro-batches; saved is the ",
                       "state after update ", s.counters.global_steps, ", without the gradients gathered since: this run goes on with ",
                       "them, one that loads the checkpoint begins that accumulation anew"));
  }
  s.set_phase(Phase::collective, "save");
  s.refresh_masters(s.store->settle());
  for (int id = 0; id < s.store->size(); ++id) s.take_edits(id);
  const auto target = folder_path(directory);
  SaveJob job;
  s.attempt("engine.save", [&] { job = s.make_save_job(target.string(), options); });
  s.attempt("engine.save", [&] {
    if (s.comm->rank() == 0) checkpoint::begin_save(target.string());
  });
  if (options.background.value_or(s.config.checkpoint.background)) {
    job.copy_values();
    job.commit.limit = s.comm->options().timeout;
    job.commit.lost = s.comm->watch_for_ends();
    s.background_save = std::make_shared<BackgroundSave>(std::move(job));
  } else {
    s.save_now(job);
  }
  s.set_phase(Phase::idle, "after save");
}

void Engine::State::save_now(SaveJob& job) {
  try {
    attempt("engine.save", [&] { job.write(); });
    attempt("engine.save", [&] { job.finish(); });
  } catch (const CheckpointError&) {
    std::error_code ignored;
    if (job.rank == 0) fs::remove_all(checkpoint::partial_of(job.directory), ignored);
    throw;
  }
}

void Engine::State::finish_save() {
  if (!background_save) return;
  const auto error = background_save->wait();
  background_save.reset();
  agree_checkpoint(error.empty() ? error : cat("a save in the background failed: ", error), "engine.save");
}

void Engine::finish_save() {
  state_->require_alive("finish_save");
  state_->finish_save();
}

void Engine::wait_for_files() {
  auto& s = *state_;
  if (!s.background_save) return;
  if (const auto error = s.background_save->wait(); !error.empty())
    log_warning(s.comm->rank(), cat("a save in the background failed: ", error));
}

bool Engine::is_saving() const { return state_->background_save != nullptr; }

}  // namespace unshard
