#pragma once
// What an engine holds. Its work is split by subject: construct.cc, engine.cc (the training protocol), step.cc (the update), access.cc
// (whole tensors and pieces), offload.cc (inference, moving states, accounts), save.cc and load.cc.
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "agreement.h"
#include "backward.h"
#include "bucket_plan.h"
#include "gradient_hooks.h"
#include "gradient_pipeline.h"
#include "gradients.h"
#include "masters.h"
#include "model.h"
#include "unshard/checkpoint/source.h"
#include "unshard/comm/communicator.h"
#include "unshard/comm/host_group.h"
#include "unshard/engine/engine.h"
#include "unshard/optim/loss_scaler.h"
#include "unshard/optim/lr_schedule.h"
#include "unshard/zero/parameter_store.h"

namespace unshard {

struct PieceToSave;
struct SaveJob;
class BackgroundSave;

/// What a load will fill, found out before it begins.
struct LoadPlan {
  struct Item {
    const ModelParameter* parameter;
    const checkpoint::SavedParameter* saved;
  };
  std::vector<Item> parameters;
  bool with_weights = true, with_optimizer = false, with_groups = false;
};

struct Engine::State {
  // construct.cc
  State(const NamedParameters& parameters, const Config& config, std::shared_ptr<Communicator> comm, EngineOptions options);
  void set_up_groups();
  void set_up_gradients();
  void set_up_optimizer();
  void apply_schedule();
  std::vector<GroupOptions> initial_groups;  ///< before any schedule: base rates

  // step.cc
  bool is_boundary() const;
  void step();
  void update();
  double gradient_scale() const;  ///< from the accumulated sum to the mean, unscaled gradient
  AgreedFacts drain_and_agree();
  GradientFacts own_facts();
  bool checks_overflow() const;
  void warn_overflow(const AgreedFacts& facts);
  std::vector<UpdateItem> update_items(const std::vector<std::uint8_t>& present);
  void publish(const std::vector<std::uint8_t>& updated);
  void refresh_masters(const std::vector<int>& changed);
  void take_edits(int id);
  at::Tensor from_pieces(const at::Tensor& piece, const ModelParameter& parameter, const char* where);
  void check_source();

  // access.cc
  at::Tensor domain(int id);  ///< compute dtype, what this rank updates: whole at stage 0, else its piece
  at::Tensor piece(int id);   ///< compute dtype
  at::Tensor gather_pieces(const at::Tensor& piece, const ModelParameter& parameter, const char* what);
  at::Tensor shaped(const at::Tensor& flat, const ModelParameter& parameter) const;
  at::Tensor flattened(const at::Tensor& value, const ModelParameter& parameter, const char* where) const;
  at::Tensor state_domain(int id, const std::string& name);
  at::Tensor own_part(const at::Tensor& domain, const ModelParameter& parameter) const;
  void write_domain(const at::Tensor& domain, const at::Tensor& flat, const ModelParameter& parameter);
  void drain_for_access();
  const ModelParameter& enter_collective(const char* call, int id) const;

  // offload.cc
  void move_states(c10::Device device);
  void reload();

  // timeline.cc
  void open_timeline();                       ///< collective
  void end_timeline_step(std::int64_t step);  ///< collective where the timeline is open
  void close_timeline();
  void count_memory();

  // save.cc
  void agree_checkpoint(const std::string& error, const char* where);  ///< collective
  void attempt(const char* where, const std::function<void()>& work);  ///< collective: work that may fail on one rank
  at::Tensor logical_piece(const at::Tensor& piece, const ModelParameter& parameter, const std::string& kind);
  std::vector<PieceToSave> pieces_to_save(bool exclude_frozen);
  checkpoint::Contents contents(const SaveOptions& save) const;
  SaveJob make_save_job(const std::string& directory, const SaveOptions& save);
  void save_now(SaveJob& job);
  void finish_save();  ///< collective while one is in the background

  // load.cc
  void begin_load(const std::string& call);
  LoadReport load_from(checkpoint::Source* source, const std::string& error, const LoadOptions& load);
  const checkpoint::SavedParameter* saved_of(const ModelParameter& parameter,
                                             const std::map<std::string, const checkpoint::SavedParameter*>& saved) const;
  LoadPlan plan_load(const checkpoint::Contents& contents, const LoadOptions& load, LoadReport& report) const;
  void check_optimizer(const checkpoint::Contents& contents) const;
  checkpoint::Range range_of(const ModelParameter& parameter, const std::string& kind, const std::string& name) const;
  std::vector<checkpoint::Range> ranges_of(const LoadPlan& plan) const;
  void fill_domain(const at::Tensor& domain, checkpoint::Source& source, const checkpoint::Range& range, const ModelParameter& parameter);
  void fill_states(checkpoint::Source& source, const ModelParameter& parameter, const checkpoint::SavedParameter& saved);
  void fill_weights(checkpoint::Source& source, const ModelParameter& parameter, const checkpoint::SavedParameter& saved);
  void fill_values(checkpoint::Source& source, const LoadPlan& plan);
  void take_progress(const checkpoint::Contents& saved, const LoadPlan& plan);

  // Small helpers.
  bool keeps_whole() const { return config.zero.stage == 0; }
  void set_phase(Phase phase, std::string_view detail);
  void require_alive(const char* call) const;
  void count_samples();   ///< batch sizes after a change at run time
  void refresh_factor();  ///< the factor for losses that don't go through the engine

  Config config;
  std::shared_ptr<Communicator> comm;
  EngineOptions options;
  std::shared_ptr<ParameterStore> store;
  Model model;
  std::unique_ptr<Masters> masters;
  BucketPlan plan;
  std::unique_ptr<Gradients> gradients;
  std::unique_ptr<GradientPipeline> pipeline;
  std::shared_ptr<Backward> backward;
  GradientHooks hooks;
  std::shared_ptr<Optimizer> optimizer;
  std::vector<GroupOptions> groups;
  std::unique_ptr<LrSchedule> schedule;
  std::optional<LossScaler> scaler;

  Counters counters;
  std::int64_t accumulation_steps = 1;
  std::int64_t micro_steps_since_boundary = 0;
  bool told_of_save_within = false;  // an accumulation
  std::optional<bool> boundary_override;
  bool no_sync = false, destroyed = false, inference = false;
  bool half_loaded = false;     ///< see [Note: nothing half loaded]
  std::set<std::string> moved;  ///< kinds of state that rest in host memory between phases
  bool step_applied = false, overflowed = false, loss_was_bad = false;
  std::optional<double> grad_norm;
  StepTimes times;
  bool writes_timeline = false;
  std::shared_ptr<BackgroundSave> background_save;
  double forward_ms = 0;
  std::chrono::steady_clock::time_point forward_start;
};

}  // namespace unshard
