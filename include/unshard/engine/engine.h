#pragma once
// The training engine: forward, backward, step over a model's named parameters, at any ZeRO stage.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "unshard/core/config.h"
#include "unshard/engine/state_options.h"
#include "unshard/optim/optimizer.h"

namespace unshard {

class Communicator;
class ParameterStore;
class LrSchedule;
class LossScaler;
namespace checkpoint {
class Source;
}

using NamedParameters = std::vector<std::pair<std::string, at::Tensor>>;

/// Indices into the engine's parameters with their hyperparameters.
struct ParamGroup {
  std::vector<std::string> names;
  GroupOptions options;
};

/// How gradients travel; the defaults suit.
struct GradientTuning {
  /// Most elements in a bucket over all ranks; JSON reduce_bucket_size lowers it. Small enough that a bucket stays in the cache.
  std::int64_t bucket_numel = 1 << 20;
  /// Shared memory a rank sets aside for buckets on their way; less if the model needs less, at least two buckets.
  std::int64_t ring_bytes = 64 << 20;
  std::function<void(int bucket)> before_reduce;  ///< called before each reduction: delays for tests; null: nothing
};

struct EngineOptions {
  /// Which parameters are updated, with what; empty: all that require a gradient, by the JSON's optimizer. In no group: frozen.
  std::vector<ParamGroup> groups;
  /// Replaces the JSON's optimizer (a client optimizer). Null and none in the JSON: no update (evaluation only; step() is an error).
  std::shared_ptr<Optimizer> optimizer;
  /// A store that zero.Init made and that already holds (some of) the parameters.
  std::shared_ptr<ParameterStore> store;
  /// Called at agreed points to find parameters the module has now (new Parameter objects); null: not checked.
  std::function<NamedParameters()> source;
  /// "key = value": what else all ranks must have alike (the caller's own optimizer and schedule); compared at start with the settings.
  std::vector<std::string> alike;
  std::int64_t hidden_size = 0;  ///< for "auto" values; 0: estimated
  /// Tells several engines of a process apart, in the names of files (timeline): letters, digits, _ and -; equal on all ranks.
  std::string name;
  GradientTuning gradients;
};

/// Bytes of model state on this rank by kind; `formula` is what ZeRO's arithmetic says without padding.
struct MemoryReport {
  std::int64_t parameters = 0, gradients = 0, optimizer = 0, buckets = 0, gathered = 0, padding = 0;
  std::int64_t formula = 0;
};

/// Wall time of the last step's parts, ms.
struct StepTimes {
  double forward_ms = 0, backward_ms = 0, reduce_wait_ms = 0, update_ms = 0, publish_ms = 0, step_ms = 0;
};

class Engine {
 public:
  /// Collective. Takes over the parameters (partitions at stage 3; casts to the compute dtype by replacing their data).
  /// \throws ConfigError, std::invalid_argument (named parameter), CommError (ranks have different models: first difference named).
  Engine(const NamedParameters& parameters, const Config& config, std::shared_ptr<Communicator> comm, EngineOptions options = {});
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  /// Announce a forward (phase for diagnosis, storages checked, autocast not included). Python's engine(...) calls it.
  void begin_forward();
  void end_forward();
  /// loss * loss scale, differentiable, for users who call backward themselves; gradients come out divided by accumulation_steps too.
  at::Tensor scale(const at::Tensor& loss, bool scale_wrt_gas = true);
  /// Scalar loss. Gradients add up until step(). \return the loss divided by accumulation steps.
  at::Tensor backward(const at::Tensor& loss, bool retain_graph = false, bool scale_wrt_gas = true);
  /// End of a micro-batch; at the boundary the agreed update: reduce, overflow check, clip, update, publish, schedule.
  void step();
  /// Gradients of the accumulation so far are dropped.
  void zero_grad();

  bool is_gradient_accumulation_boundary() const;
  void set_gradient_accumulation_boundary(std::optional<bool> value);  ///< override until reset by nullopt
  void set_accumulation_steps(std::int64_t steps);
  void set_micro_batch_size(std::int64_t samples);  ///< for the accounts (global_samples)
  void set_no_sync(bool on);                        ///< step() inside is an error

  /// Collective: global norm of the accumulated mean gradient, unscaled, before clipping; valid between backward and step.
  double compute_grad_norm();
  std::optional<double> last_grad_norm() const;  ///< of the last boundary; null before the first
  bool was_step_applied() const;
  bool overflow() const;
  double loss_scale() const;

  std::int64_t micro_steps() const, global_steps() const, global_samples() const, skipped_steps() const;
  std::int64_t applied_updates() const;
  const Config& config() const;
  Communicator& comm() const;
  ParameterStore& store() const;
  std::shared_ptr<ParameterStore> shared_store() const;
  Optimizer* optimizer() const;
  std::vector<GroupOptions>& groups();  ///< hyperparameters used by the next update
  LrSchedule* schedule() const;

  // Whole tensors, on every rank; collective; parameters by id in store().
  at::Tensor full_fp32_param(int id);
  at::Tensor full_grad(int id);  ///< mean over ranks, unscaled, fp32; undefined when no rank had one
  at::Tensor full_state(int id, const std::string& name);
  void set_full_fp32_param(int id, const at::Tensor& value);
  void set_full_grad(int id, const at::Tensor& value);
  void set_full_state(int id, const std::string& name, const at::Tensor& value);
  // This rank's flat pieces (what the "local" access functions show). Not collective, but for local_grad, which needs all ranks.
  at::Tensor local_fp32_param(int id);
  at::Tensor local_grad(int id);
  at::Tensor local_state(int id, const std::string& name);
  // Write them (each rank its own; collective).
  void set_local_fp32_param(int id, const at::Tensor& value);
  void set_local_grad(int id, const at::Tensor& value);
  void set_local_state(int id, const std::string& name, const at::Tensor& value);

  void enter_inference();  ///< gather once; no collectives until leave_inference()
  void leave_inference();
  /// Move optimizer state / masters / gradients to `device` between phases, and back.
  void offload_states(const std::vector<std::string>& include = {}, const std::string& device = "cpu");
  void reload_states();

  /// The whole training state to the folder `directory`, each rank its own pieces; collective. The folder is complete or absent whoever is
  /// killed when, and a former one of that name stays until then. In the background (see SaveOptions) it costs one copy in host memory; the
  /// next save(), load(), finish_save() or destroy() waits for it and throws what went wrong.
  /// Within an accumulation: the state after the last update; the gradients gathered since aren't part of it.
  /// \throws CheckpointError on all ranks, naming file and reason.
  void save(const std::string& directory, const SaveOptions& options = {});
  /// Wait until a save in the background is on the disk; collective.
  void finish_save();
  /// Not collective: until what this rank does for it is done (its file; rank 0: the commit), for a process that is about to end. Errors
  /// are logged.
  void wait_for_files();
  bool is_saving() const;  ///< one is in the background, as far as save(), load() and finish_save() know
  /// Back to a state saved at any world size, stage and dtype; collective. Reads what this rank keeps (at stage 0 everything); needs little
  /// memory beside that.
  /// \throws CheckpointError on all ranks, naming file and reason; nothing was changed.
  LoadReport load(const std::string& directory, const LoadOptions& options = {});
  /// The same from whatever implements Source; each rank has its own.
  LoadReport load_from(checkpoint::Source& source, const LoadOptions& options = {});

  MemoryReport memory() const;
  StepTimes times() const;
  /// The timeline's file is complete; nothing more is recorded. destroy() and the destructor do it too. Sends nothing, but is for all ranks
  /// at the same step: ranks that still record read their clocks together. Only what opened the timeline closes it.
  void close_timeline();
  /// Whether this engine opened its group's timeline. An engine that shares the group with one that did has its spans in that one's file.
  bool writes_timeline() const;
  /// Rows "parameter dtype, gradient accumulation, communication, master, states" for people.
  std::string dtype_table() const;

  /// Plain torch modules again, all memory given back. Idempotent; the engine can't be used after it. Collective at stage 3.
  void destroy();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace unshard
