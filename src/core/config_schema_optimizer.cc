// Rows of optimizer and scheduler, with the parameters of the types that are known by name.
#include "core/config_schema.h"

namespace unshard::config {
namespace {

using enum Kind;
using enum State;

constexpr Range kDecay = {.min = 0, .max = 1, .open_max = true};

Key lr(std::string_view initial) { return {.name = "lr", .kind = number, .initial = initial, .range = kNotNegative}; }
Key weight_decay(std::string_view initial) { return {.name = "weight_decay", .kind = number, .initial = initial, .range = kNotNegative}; }
Key betas() { return {.name = "betas", .kind = numbers, .initial = "[0.9, 0.999]", .range = kDecay, .note = "two of them", .length = 2}; }
Key max_grad_norm() {
  return {
      .name = "max_grad_norm", .state = removed, .note = "clipping is set by the top-level key gradient_clipping: move the value there"};
}

/// What torch's and DeepSpeed's constructors also take, and which changes nothing in the fused kernels.
std::vector<Key> with_common(std::vector<Key> keys) {
  keys.push_back({.name = "maximize", .initial = "false"});
  keys.push_back({.name = "foreach", .state = accepted});
  keys.push_back({.name = "fused", .state = accepted});
  keys.push_back({.name = "set_grad_none", .initial = "true", .state = accepted});
  keys.push_back(max_grad_norm());
  return keys;
}

Section adam() {
  return {"optimizer.params",
          with_common({
              lr("0.001"),
              betas(),
              {.name = "eps", .kind = number, .initial = "1e-08", .range = kNotNegative},
              weight_decay("0"),
              {.name = "bias_correction", .initial = "true"},
              {.name = "adam_w_mode", .initial = "true", .note = "false: weight decay is added to the gradient (Adam only)"},
              {.name = "amsgrad", .initial = "false", .state = not_built},
              {.name = "torch_adam",
               .initial = "false",
               .note = "true: torch.optim's class, which checks its own parameters; its AdamW decays by 0.01 unless told"},
              {.name = "fp32_optimizer_states", .initial = "true", .state = accepted, .note = "states are fp32, as the masters"},
          }),
          {"adam", "adamw"}};
}

Section sgd() {
  return {"optimizer.params",
          with_common({
              lr("0.001"),
              {.name = "momentum", .kind = number, .initial = "0", .range = kNotNegative},
              {.name = "dampening", .kind = number, .initial = "0"},
              weight_decay("0"),
              {.name = "nesterov", .initial = "false"},
          }),
          {"sgd"}};
}

Section adagrad() {
  return {"optimizer.params",
          with_common({
              lr("0.01"),
              {.name = "lr_decay", .kind = number, .initial = "0", .range = kNotNegative},
              {.name = "eps", .kind = number, .initial = "1e-10", .range = kNotNegative},
              weight_decay("0"),
              {.name = "initial_accumulator_value", .kind = number, .initial = "0", .range = kNotNegative},
          }),
          {"adagrad"}};
}

Section lion() { return {"optimizer.params", with_common({lr("0.001"), betas(), weight_decay("0")}), {"lion"}}; }

Section lamb() {
  return {"optimizer.params",
          with_common({
              lr("0.001"),
              betas(),
              {.name = "eps", .kind = number, .initial = "1e-08", .range = kNotNegative},
              {.name = "eps_inside_sqrt", .initial = "false"},
              weight_decay("0"),
              {.name = "min_coeff", .kind = number, .initial = "0.01", .range = kNotNegative},
              {.name = "max_coeff", .kind = number, .initial = "10", .range = kNotNegative},
              {.name = "bias_correction", .initial = "true"},
              {.name = "amsgrad", .initial = "false", .state = not_built},
          }),
          {"lamb"}};
}

Key warmup_num_steps() {
  return {.name = "warmup_num_steps", .kind = integer, .initial = "1000", .range = kCount, .note = "1 counts as 2"};
}
Key warmup_type() { return {.name = "warmup_type", .kind = choice, .initial = R"("log")", .accepted = R"(["log", "linear"])"}; }
Key last_batch_iteration() { return {.name = "last_batch_iteration", .kind = integer, .initial = "-1", .range = {.min = -1}}; }
Key total_num_steps() { return {.name = "total_num_steps", .kind = integer, .range = kCount, .required = true}; }

Section warmup_lr() {
  return {"scheduler.params",
          {
              {.name = "warmup_min_lr", .kind = per_group, .initial = "0", .range = kNotNegative},
              {.name = "warmup_max_lr", .kind = per_group, .range = kNotNegative, .note = "null: the optimizer's lr"},
              warmup_num_steps(),
              warmup_type(),
              last_batch_iteration(),
          },
          {"warmuplr"}};
}

Section warmup_decay_lr() {
  return {"scheduler.params",
          {
              total_num_steps(),
              {.name = "warmup_min_lr", .kind = per_group, .initial = "0", .range = kNotNegative},
              {.name = "warmup_max_lr", .kind = per_group, .initial = "0.001", .range = kNotNegative},
              warmup_num_steps(),
              warmup_type(),
              last_batch_iteration(),
          },
          {"warmupdecaylr"}};
}

Section warmup_cosine_lr() {
  return {"scheduler.params",
          {
              total_num_steps(),
              {.name = "warmup_min_ratio", .kind = number, .initial = "0", .range = kShare},
              warmup_num_steps(),
              {.name = "cos_min_ratio", .kind = number, .initial = "0.0001", .range = kShare},
              warmup_type(),
              last_batch_iteration(),
          },
          {"warmupcosinelr"}};
}

Section one_cycle() {
  return {"scheduler.params",
          {
              {.name = "cycle_min_lr", .kind = per_group, .range = kNotNegative, .required = true},
              {.name = "cycle_max_lr", .kind = per_group, .range = kNotNegative, .required = true},
              {.name = "decay_lr_rate", .kind = number, .initial = "0"},
              {.name = "cycle_first_step_size", .kind = integer, .initial = "2000", .range = kCount},
              {.name = "cycle_second_step_size", .kind = integer, .range = kNotNegative, .note = "null: as the first"},
              {.name = "cycle_first_stair_count", .kind = integer, .initial = "0", .range = kNotNegative, .note = "0: a straight line"},
              {.name = "cycle_second_stair_count", .kind = integer, .range = kNotNegative, .note = "null: as the first"},
              {.name = "decay_step_size", .kind = integer, .initial = "0", .range = kNotNegative, .note = "0: no decay after the cycle"},
              {.name = "cycle_momentum", .initial = "true"},
              {.name = "cycle_min_mom", .kind = number, .initial = "0.8", .range = kShare},
              {.name = "cycle_max_mom", .kind = number, .initial = "0.9", .range = kShare},
              {.name = "decay_mom_rate", .kind = number, .initial = "0"},
              last_batch_iteration(),
          },
          {"onecycle"}};
}

Section lr_range_test() {
  return {"scheduler.params",
          {
              {.name = "lr_range_test_min_lr", .kind = per_group, .initial = "0.001", .range = kNotNegative},
              {.name = "lr_range_test_step_size", .kind = integer, .initial = "2000", .range = kCount},
              {.name = "lr_range_test_step_rate", .kind = number, .initial = "1.0", .range = kPositive},
              {.name = "lr_range_test_staircase", .initial = "false"},
              last_batch_iteration(),
          },
          {"lrrangetest"}};
}

constexpr std::string_view kTorchInstead = "use Adam, AdamW, SGD, Adagrad, Lion, Lamb or a class of torch.optim";
constexpr std::string_view kOwnMuon =
    "pass a torch.optim.Muon of your own as `optimizer` (at ZeRO stage 0 only), or use Adam, AdamW, SGD, Adagrad, Lion or Lamb";
constexpr std::string_view kOneBit = "1-bit optimizers left DeepSpeed as well; use Adam or AdamW";
constexpr NamedType kOptimizers[] = {
    {"Adam"},
    {"AdamW"},
    {"SGD"},
    {"Adagrad"},
    {"Lion"},
    {"Lamb"},
    {"Muon", not_built, kOwnMuon},
    {"MuAdam", not_built, kTorchInstead},
    {"MuAdamW", not_built, kTorchInstead},
    {"MuSGD", not_built, kTorchInstead},
    {"OneBitAdam", removed, kOneBit},
    {"OneBitLamb", removed, kOneBit},
    {"ZeroOneAdam", removed, kOneBit},
};
constexpr NamedType kSchedulers[] = {{"WarmupLR"}, {"WarmupDecayLR"}, {"WarmupCosineLR"}, {"OneCycle"}, {"LRRangeTest"}};

template <std::size_t N>
const NamedType* find_in(const NamedType (&types)[N], std::string_view type) {
  for (const auto& known : types)
    if (lower_case(known.name) == lower_case(type)) return &known;
  return nullptr;
}

}  // namespace

const NamedType* find_type(std::string_view owner, std::string_view type) {
  return owner == "optimizer" ? find_in(kOptimizers, type) : find_in(kSchedulers, type);
}

std::vector<Section> optimizer_sections() {
  Section optimizer = {
      "optimizer",
      {
          {.name = "type", .kind = string, .note = "Adam, AdamW, SGD, Adagrad, Lion in any case, or a class of torch.optim"},
          {.name = "params", .kind = object, .note = "keyword arguments; checked for the types named here"},
          {.name = "legacy_fusion", .initial = "false", .state = accepted},
      }};
  Section scheduler = {"scheduler",
                       {
                           {.name = "type",
                            .kind = string,
                            .note = "WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest, or a torch.optim.lr_scheduler class"},
                           {.name = "params", .kind = object, .note = "keyword arguments; checked for the types named here"},
                       }};
  return {optimizer,          adam(),      sgd(),          adagrad(), lion(), lamb(), scheduler, warmup_lr(), warmup_decay_lr(),
          warmup_cosine_lr(), one_cycle(), lr_range_test()};
}

}  // namespace unshard::config
