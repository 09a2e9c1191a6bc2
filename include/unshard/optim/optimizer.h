#pragma once
// What updates the parameters. The engine hands over flat pieces; what an optimizer wants to know of other ranks' pieces it asks of
// UpdateScale.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace unshard {

/// Hyperparameters of one group; an optimizer reads what it knows.
struct GroupOptions {
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0, momentum = 0, dampening = 0, lr_decay = 0;
  double initial_accumulator = 0, min_coeff = 0.01, max_coeff = 10;
  bool nesterov = false, bias_correction = true, maximize = false, eps_inside_sqrt = false;
};

/// One parameter's piece on this rank: all tensors flat, same numel, contiguous.
struct UpdateItem {
  int parameter = -1;  ///< id in the store; key of the optimizer's state
  int group = 0;
  at::Tensor param;   ///< compute dtype, where it rests; written
  at::Tensor master;  ///< fp32 master weights, or undefined when `param` is fp32 itself (or masters are off)
  at::Tensor grad;    ///< accumulated gradient sum, fp32 (or grad_accum_dtype); read only
};

/// How gradients become what the formula sees: g = grad * scale. `scale` holds 1/(world * loss_scale) and the clip factor.
struct UpdateScale {
  double scale = 1;
  /// Add up numbers over the ranks that hold pieces of the same parameters; every rank calls it alike. Null: each item is a whole
  /// parameter. For formulas that look at a whole tensor (LAMB's norms).
  std::function<void(std::vector<double>&)> sum_over_ranks = {};
};

/// Per-parameter step counts live in the optimizer's state, as in torch.
class Optimizer {
 public:
  virtual ~Optimizer() = default;
  virtual std::string type() const = 0;  ///< "adamw", "sgd", ..., or the client's class
  /// Update every item once. Items of parameters that had no gradient on any rank are not in the list.
  virtual void step(const std::vector<UpdateItem>& items, const std::vector<GroupOptions>& groups, const UpdateScale& scale) = 0;
  /// Names of per-element states ("exp_avg", "exp_avg_sq"), in a fixed order.
  virtual std::vector<std::string> state_names() const = 0;
  /// Names of states that are about to be loaded, for optimizers that know theirs only after their first step.
  virtual void expect_states(const std::vector<std::string>& /*names*/) {}
  /// Flat state of one parameter's piece (created if missing, zero, given `like`'s numel), or undefined for an unknown name.
  virtual at::Tensor state(int parameter, std::string_view name, const at::Tensor& like) = 0;
  virtual std::int64_t step_count(int parameter) const = 0;
  virtual void set_step_count(int parameter, std::int64_t steps) = 0;
  /// Bytes of state held now.
  virtual std::int64_t state_bytes() const = 0;
  /// Set aside the state of these items at start, so that memory is known before the first step.
  virtual void prepare(const std::vector<UpdateItem>& items, const std::vector<GroupOptions>& groups) = 0;
};

/// "adam", "adamw", "sgd", "adagrad", "lion": the fused kernels on CPU, torch's fused ops elsewhere. "lamb": torch's ops everywhere.
/// \param decoupled_decay  AdamW's decay; DeepSpeed's "Adam" is AdamW unless adam_w_mode is false.
/// \throws std::invalid_argument unknown type, with the list of known ones.
std::unique_ptr<Optimizer> make_optimizer(const std::string& type, bool decoupled_decay = true);

/// Parse JSON keyword arguments ("lr", "betas", ...) of a known type. \throws ConfigError unknown key with the nearest right one.
struct ParsedOptimizer {
  std::string type;  ///< lower case, resolved: "adam" with adam_w_mode true is "adamw"
  GroupOptions options;
};
ParsedOptimizer parse_optimizer(const std::string& type, const std::string& params_json);
bool is_known_optimizer(const std::string& type);

}  // namespace unshard
