#include "optim/update.h"

#include <algorithm>
#include <cmath>

#include "core/cpu_isa.h"
#include "core/parallel.h"
#include "unshard/core/error.h"

namespace unshard::kernels {
namespace {

/// What starting on one more array costs, in elements; keeps threads balanced over many tiny arrays.
constexpr std::int64_t kArrayCost = 64;
/// Below this many elements a second thread costs more than it saves.
constexpr std::int64_t kGrain = 32 * 1024;

float as_float(double x) { return static_cast<float>(x); }

Rule plain_rule(RuleKind kind, double grad_scale, double lr) {
  Rule rule{};
  rule.kind = kind;
  rule.grad_scale = as_float(grad_scale);
  rule.keep = 1;
  rule.lr = as_float(lr);
  return rule;
}

Element element_of(const char* where, const char* what, c10::ScalarType dtype, bool wide_allowed) {
  if (dtype == c10::ScalarType::BFloat16) return Element::bf16;
  if (dtype == c10::ScalarType::Half) return Element::f16;
  if (dtype == c10::ScalarType::Float && wide_allowed) return Element::f32;
  throw std::invalid_argument(cat("[optim.", where, "] ", what, " has dtype ", c10::toString(dtype),
                                  "; accepted: ", wide_allowed ? "fp32, bf16, fp16" : "bf16, fp16 (an fp32 parameter is its own master)"));
}

}  // namespace

Rule adam_rule(const AdamArgs& args) {
  require(args.step >= 1, "[optim.adam] step ", args.step, "; steps count from 1");
  const double step = static_cast<double>(args.step);
  const double correction1 = args.bias_correction ? 1 - std::pow(args.beta1, step) : 1;
  const double correction2 = args.bias_correction ? 1 - std::pow(args.beta2, step) : 1;
  Rule rule = plain_rule(RuleKind::adam, args.grad_scale, args.lr / correction1);
  if (args.decoupled) rule.keep = as_float(1 - args.lr * args.weight_decay);
  if (!args.decoupled) rule.l2 = as_float(args.weight_decay);
  rule.beta1 = as_float(args.beta1);
  rule.rest1 = as_float(1 - args.beta1);
  rule.beta2 = as_float(args.beta2);
  rule.rest2 = as_float(1 - args.beta2);
  rule.inverse_root = as_float(1 / std::sqrt(correction2));
  rule.eps = as_float(args.eps);
  return rule;
}

Rule sgd_rule(double lr, double momentum, double dampening, double weight_decay, bool nesterov, bool first_step, double grad_scale) {
  Rule rule = plain_rule(momentum != 0 ? RuleKind::sgd_momentum : RuleKind::sgd, grad_scale, lr);
  rule.l2 = as_float(weight_decay);
  rule.beta1 = as_float(momentum);
  rule.rest1 = as_float(1 - dampening);
  rule.nesterov = nesterov;
  rule.first_step = first_step;
  return rule;
}

Rule adagrad_rule(double lr, double eps, double weight_decay, double grad_scale) {
  Rule rule = plain_rule(RuleKind::adagrad, grad_scale, lr);
  rule.l2 = as_float(weight_decay);
  rule.eps = as_float(eps);
  return rule;
}

Rule lion_rule(double lr, double beta1, double beta2, double weight_decay, double grad_scale) {
  Rule rule = plain_rule(RuleKind::lion, grad_scale, lr);
  rule.keep = as_float(1 - lr * weight_decay);
  rule.beta1 = as_float(beta1);
  rule.rest1 = as_float(1 - beta1);
  rule.beta2 = as_float(beta2);
  rule.rest2 = as_float(1 - beta2);
  return rule;
}

UpdateArrays update_arrays(const char* where, float* master, Array param, Array grad, float* first, float* second) {
  UpdateArrays arrays{master, {nullptr, Element::bf16}, {grad.data, element_of(where, "the gradient", grad.dtype, true)}, first, second};
  if (param.data != nullptr) arrays.param = {param.data, element_of(where, "the 16-bit parameter", param.dtype, false)};
  return arrays;
}

void run_updates(const Update* updates, std::size_t count) {
  const UpdateKernels& kernels = select_table(update_kernels_portable, update_kernels_avx2, update_kernels_avx512);
  if (count == 1 && updates->n <= kGrain) return kernels.update(0, updates->n, updates->arrays, updates->rule);
  // Position of each array on a line that is cut into equal pieces.
  std::vector<std::int64_t> starts(count + 1, 0);
  for (std::size_t i = 0; i < count; ++i) starts[i + 1] = starts[i] + updates[i].n + kArrayCost;
  parallel_ranges(starts[count], kGrain, [&](std::int64_t begin, std::int64_t end) {
    auto i = static_cast<std::size_t>(std::upper_bound(starts.begin(), starts.end(), begin) - starts.begin()) - 1;
    for (; i < count && starts[i] < end; ++i) {
      const std::int64_t from = std::max<std::int64_t>(begin - starts[i], 0), to = std::min(end - starts[i], updates[i].n);
      if (from < to) kernels.update(from, to, updates[i].arrays, updates[i].rule);
    }
  });
}

void adam(std::int64_t n, float* master, Array param, Array grad, float* exp_avg, float* exp_avg_sq, const AdamArgs& args) {
  const Update update{n, update_arrays("adam", master, param, grad, exp_avg, exp_avg_sq), adam_rule(args)};
  run_updates(&update, 1);
}

void sgd(std::int64_t n, float* master, Array param, Array grad, float* momentum_buffer, double lr, double momentum, double dampening,
         double weight_decay, bool nesterov, bool first_step, double grad_scale) {
  require(momentum == 0 || momentum_buffer != nullptr, "[optim.sgd] momentum ", momentum, " needs a momentum buffer");
  const Update update{n, update_arrays("sgd", master, param, grad, momentum_buffer, nullptr),
                      sgd_rule(lr, momentum, dampening, weight_decay, nesterov, first_step, grad_scale)};
  run_updates(&update, 1);
}

void adagrad(std::int64_t n, float* master, Array param, Array grad, float* sum, double lr, double eps, double weight_decay,
             double grad_scale) {
  const Update update{n, update_arrays("adagrad", master, param, grad, sum, nullptr), adagrad_rule(lr, eps, weight_decay, grad_scale)};
  run_updates(&update, 1);
}

void lion(std::int64_t n, float* master, Array param, Array grad, float* exp_avg, double lr, double beta1, double beta2,
          double weight_decay, double grad_scale) {
  const Update update{n, update_arrays("lion", master, param, grad, exp_avg, nullptr),
                      lion_rule(lr, beta1, beta2, weight_decay, grad_scale)};
  run_updates(&update, 1);
}

}  // namespace unshard::kernels
