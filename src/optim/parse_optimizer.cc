// The JSON section `optimizer`: names, keyword arguments and defaults of the optimizers that are built in. Table: docs/optimizers.md.
#include <algorithm>
#include <cctype>
#include <string>
#include <vector>

#include "optim/params_reader.h"
#include "unshard/core/error.h"
#include "unshard/optim/optimizer.h"

namespace unshard {
namespace {

const std::vector<std::string> kKnown{"adam", "adamw", "sgd", "adagrad", "lion", "lamb"};

std::string lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return text;
}

/// Arguments that every type has, and those of torch that choose an implementation, not a formula.
void read_common(ParamsReader& reader, GroupOptions& options, double default_lr, double default_decay = 0) {
  options.lr = reader.number("lr", default_lr);
  reader.check(options.lr >= 0, "lr", "wanted a number >= 0");
  options.weight_decay = reader.number("weight_decay", default_decay);
  reader.check(options.weight_decay >= 0, "weight_decay", "wanted a number >= 0");
  options.maximize = reader.flag("maximize", false);
  for (const char* key : {"foreach", "fused", "set_grad_none", "torch_adam", "fp32_optimizer_states"}) reader.ignore(key);
  reader.only("capturable", false, "updates are not captured in graphs");
  reader.only("differentiable", false, "gradients do not flow through an update");
  if (reader.number("max_grad_norm"))
    reader.fail("max_grad_norm", "set \"gradient_clipping\" at the top level of the configuration instead");
}

void read_betas(ParamsReader& reader, GroupOptions& options) {
  const auto betas = reader.pair("betas", {0.9, 0.999});
  reader.check(betas.first >= 0 && betas.first < 1 && betas.second >= 0 && betas.second < 1, "betas", "wanted two numbers in [0, 1)");
  options.beta1 = betas.first;
  options.beta2 = betas.second;
}

void read_eps(ParamsReader& reader, GroupOptions& options, double fallback) {
  options.eps = reader.number("eps", fallback);
  reader.check(options.eps >= 0, "eps", "wanted a number >= 0");
}

/// \return  whether weight decay is decoupled.
bool read_adam(ParamsReader& reader, GroupOptions& options, bool named_adamw) {
  const bool decoupled = reader.flag("adam_w_mode", true) || named_adamw;
  // torch_adam asks for torch.optim's class, whose AdamW decays unless told otherwise.
  read_common(reader, options, 1e-3, decoupled && reader.flag("torch_adam", false) ? 1e-2 : 0);
  read_betas(reader, options);
  read_eps(reader, options, 1e-8);
  options.bias_correction = reader.flag("bias_correction", true);
  reader.only("amsgrad", false, "AMSGrad needs a third state; pass torch.optim.AdamW(amsgrad=True) as a client optimizer");
  return decoupled;
}

void read_sgd(ParamsReader& reader, GroupOptions& options) {
  read_common(reader, options, 1e-3);
  options.momentum = reader.number("momentum", 0);
  reader.check(options.momentum >= 0, "momentum", "wanted a number >= 0");
  options.dampening = reader.number("dampening", 0);
  options.nesterov = reader.flag("nesterov", false);
  reader.check(!options.nesterov || (options.momentum > 0 && options.dampening == 0), "nesterov",
               "Nesterov momentum needs momentum > 0 and dampening 0");
}

void read_adagrad(ParamsReader& reader, GroupOptions& options) {
  read_common(reader, options, 1e-2);
  read_eps(reader, options, 1e-10);
  options.lr_decay = reader.number("lr_decay", 0);
  reader.check(options.lr_decay >= 0, "lr_decay", "wanted a number >= 0");
  options.initial_accumulator = reader.number("initial_accumulator_value", 0);
  reader.check(options.initial_accumulator >= 0, "initial_accumulator_value", "wanted a number >= 0");
  reader.only("amsgrad", false, "Adagrad has no such variant");
}

void read_lamb(ParamsReader& reader, GroupOptions& options) {
  read_common(reader, options, 1e-3);
  read_betas(reader, options);
  read_eps(reader, options, 1e-8);
  options.eps_inside_sqrt = reader.flag("eps_inside_sqrt", false);
  options.bias_correction = reader.flag("bias_correction", true);
  options.min_coeff = reader.number("min_coeff", 0.01);
  options.max_coeff = reader.number("max_coeff", 10);
  reader.check(options.min_coeff >= 0, "min_coeff", "wanted a number >= 0");
  reader.check(options.max_coeff >= options.min_coeff, "max_coeff", "wanted a number of at least min_coeff");
  reader.only("amsgrad", false, "LAMB has no such variant");
}

void read_lion(ParamsReader& reader, GroupOptions& options) {
  read_common(reader, options, 1e-3);
  read_betas(reader, options);
}

}  // namespace

bool is_known_optimizer(const std::string& type) { return std::find(kKnown.begin(), kKnown.end(), lower(type)) != kKnown.end(); }

ParsedOptimizer parse_optimizer(const std::string& type, const std::string& params_json) {
  ParsedOptimizer parsed{lower(type), {}};
  if (!is_known_optimizer(type)) {
    const std::string near = nearest_name(type, kKnown);
    throw ConfigError(
        cat("optimizer.type \"", type, "\" is not built in", near.empty() ? "" : "; did you mean \"" + near + "\"?",
            " Built in: adam, adamw, sgd, adagrad, lion, lamb; any other torch.optim optimizer can be passed as a client optimizer"));
  }
  ParamsReader reader("optimizer.params of " + type, params_json);
  if (parsed.type == "sgd") {
    read_sgd(reader, parsed.options);
  } else if (parsed.type == "adagrad") {
    read_adagrad(reader, parsed.options);
  } else if (parsed.type == "lion") {
    read_lion(reader, parsed.options);
  } else if (parsed.type == "lamb") {
    read_lamb(reader, parsed.options);
  } else if (read_adam(reader, parsed.options, parsed.type == "adamw")) {
    parsed.type = "adamw";
  }
  reader.finish();
  return parsed;
}

}  // namespace unshard
