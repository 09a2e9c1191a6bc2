#pragma once
// The DeepSpeed JSON, typed, validated, with the origin of every value. Reference for keys: docs/config.md.
#include <c10/core/ScalarType.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace unshard {

/// Where a resolved value came from; printed by `unshard config show` and in errors.
enum class Origin { default_value, file, argument, derived, model, environment, code };

enum class OffloadDevice { none, cpu, nvme };

struct BatchConfig {
  std::int64_t train_batch_size = 1;    ///< samples per update over all ranks
  std::int64_t micro_batch_size = 1;    ///< samples per rank per forward; JSON train_micro_batch_size_per_gpu
  std::int64_t accumulation_steps = 1;  ///< micro-batches per update; JSON gradient_accumulation_steps
  bool micro_batch_assumed = false;     ///< none was given: 1 is used in the accounts, and one line says so
};

struct OptimizerConfig {
  std::string type;                ///< as written: "Adam", "AdamW", ..., or a class of torch.optim; empty: none
  std::string params_json = "{}";  ///< JSON object of keyword arguments
};

struct SchedulerConfig {
  std::string type;  ///< "WarmupLR", ... or a torch class name; empty: none
  std::string params_json = "{}";
};

struct Fp16Config {
  bool enabled = false, auto_cast = false, consecutive_hysteresis = false;
  double loss_scale = 0;  ///< 0: dynamic
  int initial_scale_power = 16, loss_scale_window = 1000, hysteresis = 2;
  double min_loss_scale = 1;
};

struct Bf16Config {
  bool enabled = false;
  bool check_grad_overflow = true;
};

struct AutocastConfig {
  bool enabled = false;
  std::optional<c10::ScalarType> dtype;  ///< null: torch's default for the device
};

struct OffloadConfig {
  OffloadDevice device = OffloadDevice::none;
  bool pin_memory = true;
};

struct ZeroConfig {
  int stage = 0;  ///< 0 nothing, 1 optimizer states, 2 and gradients, 3 and parameters are partitioned
  std::int64_t reduce_bucket_numel = 500'000'000;
  std::int64_t allgather_bucket_numel = 500'000'000;
  std::int64_t prefetch_bucket_numel = 50'000'000;
  std::int64_t param_persistence_threshold = 100'000;    ///< elements; smaller parameters stay whole on every rank
  std::int64_t model_persistence_threshold = INT64_MAX;  ///< cap on the sum of persistent elements
  std::int64_t max_live_parameters = 1'000'000'000;      ///< elements gathered at once (memory that isn't shared)
  std::int64_t max_reuse_distance = 1'000'000'000;
  std::int64_t sub_group_size = 1'000'000'000;
  bool reduce_bucket_auto = false, prefetch_bucket_auto = false,
       persistence_threshold_auto = false;  ///< "auto": chosen from model and link
  bool overlap_comm = true;
  bool contiguous_gradients = true, reduce_scatter = true, allgather_partitions = true;
  bool gather_16bit_weights_on_model_save = false;
  OffloadConfig offload_optimizer, offload_param;
};

struct CheckpointConfig {
  std::string tag_validation = "Warn";  ///< what happens when ranks save under different tags: "Ignore", "Warn", "Fail"
  bool load_universal = false;          ///< a checkpoint to load is in DeepSpeed's universal layout
  bool use_node_local_storage = false;  ///< folders aren't shared by the hosts: refused by engines of several
  /// Files are written while training goes on. JSON unshard.checkpoint.async, or checkpoint.writer.decoupled.
  bool background = false;
  bool decoupled = false;
  int keep = 0;  ///< remove all but the newest so many; 0: keep all. JSON unshard.checkpoint.keep
};

/// Options of Unshard's own, JSON section "unshard".
struct UnshardConfig {
  /// "auto": ranks on one host share memory; "off": every transfer goes through c10d (used by tests to exercise the gather path).
  bool share_memory = true;
  /// What names this rank's host: ranks of one name share memory, as far as their machine allows. Empty: found out. JSON `host`,
  /// environment UNSHARD_HOST (which can differ by rank).
  std::string host;
  /// Seconds a rank waits for its peers before it reports who waits where. Environment default: none. JSON `timeout_s`.
  double timeout_s = 1800;
  /// Seconds for collective calls (save, load, gather, step) that a rank misses. JSON `collective_check_s`.
  double collective_check_s = 60;
  /// Compare values that ranks wrote to one parameter. JSON `debug`.
  bool debug = false;
  /// A folder for every rank's record (see comm/run_record.h). JSON `run_dir`, environment UNSHARD_RUN_DIR.
  std::string run_dir;
  /// A folder for what each rank did when (see core/timeline.h); empty: not recorded. JSON `timeline`, environment UNSHARD_TIMELINE.
  std::string timeline;
};

/// Facts about the world and the caller that resolution needs.
struct ConfigContext {
  int world_size = 1;               ///< data-parallel world
  bool deepspeed_defaults = false;  ///< the drop-in: gradient_clipping absent means 1.0
  std::string source = "argument";  ///< shown as the origin: a file name, or "argument"
};

/// One line of the resolved table.
struct ConfigRow {
  std::string key, value, origin;
};

class Config {
 public:
  Config();
  /// Parse and validate; comments and trailing commas are allowed, duplicate keys are an error.
  /// \throws ConfigError naming key, value, origin and what is accepted; a misspelt key at any depth with the nearest right one;
  ///         a known key that isn't built yet, when its value asks for something.
  static Config from_file(const std::string& path, const ConfigContext& context = {});
  static Config from_json(std::string_view json, const ConfigContext& context = {});

  BatchConfig batch;
  OptimizerConfig optimizer;
  SchedulerConfig scheduler;
  Fp16Config fp16;
  Bf16Config bf16;
  AutocastConfig autocast;
  ZeroConfig zero;
  CheckpointConfig checkpoint;
  UnshardConfig unshard;
  double gradient_clipping = 0;                 ///< max global 2-norm; 0: off
  bool gradient_clipping_defaulted = false;     ///< true: the drop-in's 1.0 is in force and must be said in one line
  std::optional<std::int64_t> steps_per_print;  ///< null: never
  bool wall_clock_breakdown = false, memory_breakdown = false, dump_state = false, dataloader_drop_last = false;
  bool prescale_gradients = false;
  double gradient_predivide_factor = 1;
  bool allreduce_mean = true;  ///< gradient_allreduce_op: mean | sum
  bool managed_gradient_accumulation = true;
  std::optional<c10::ScalarType> communication_dtype, grad_accum_dtype, param_dtype, buffer_dtype;

  /// dtype of the weights in forward: data_types.param_dtype, else fp16, bf16, or nullopt = leave the model as it is.
  std::optional<c10::ScalarType> compute_dtype() const;
  /// Resolve "auto" values of zero from the model (HF's formulas for hidden size h: h*h, 0.9*h*h, 10*h, bounded by the model's size) and
  /// from the link between hosts: a message carries four round trips' elements at least, and what crosses within one stays whole.
  /// \param hidden_size  0: estimated from the largest matrix. \param total_numel elements in the model.
  /// \param link_numel   elements that the link carries in a round trip; 0: one host, or not known
  void resolve_auto(std::int64_t hidden_size, std::int64_t largest_numel, std::int64_t total_numel, std::int64_t link_numel = 0);
  bool any_auto() const { return zero.reduce_bucket_auto || zero.prefetch_bucket_auto || zero.persistence_threshold_auto; }
  /// Every resolved key in document order, for `unshard config show`.
  std::vector<ConfigRow> table() const;
  /// The input as plain JSON text (after "auto" resolution of the batch triple), for `engine.config`.
  std::string to_json() const;
  /// Lines to say once at start (assumed micro batch, defaulted clipping, accepted no-ops).
  std::vector<std::string> notices() const;

 private:
  struct Details;
  std::shared_ptr<const Details> details_;
};

}  // namespace unshard
