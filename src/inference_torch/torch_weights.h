#pragma once
// A decoder's weights as tensors on a device.
#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "inference/model/model_config.h"
#include "inference/weights/weight_source.h"

namespace unshard::inference {

struct TorchLinear {
  at::Tensor weight, bias;  ///< [N, K]; [N] or undefined
};

struct TorchNorm {
  at::Tensor weight, bias;  ///< fp32, the family's offset added
  bool there() const { return weight.defined(); }
};

struct TorchMlp {
  TorchLinear in, down;  ///< in: gate's rows, then up's, where gated; else up's
};

struct TorchExperts {
  TorchLinear router;  ///< fp32
  std::vector<TorchMlp> experts;
  TorchMlp shared;
  TorchLinear shared_switch;  ///< fp32, [1, hidden]
};

struct TorchLayer {
  TorchNorm attention_norm, q_norm, k_norm, post_attention_norm, mlp_norm, post_mlp_norm;
  TorchLinear qkv, attention_output;
  bool dense = true;
  TorchMlp mlp;
  TorchExperts experts;
  std::int64_t window = 0;
  bool local_rope = false;
};

struct TorchWeights {
  at::Tensor embedding, positions;  ///< [vocab, hidden], [context, hidden]
  TorchNorm final_norm;
  TorchLinear output;
  std::vector<TorchLayer> layers;
  std::int64_t bytes = 0, parameters = 0;
  std::vector<std::string> unread;  ///< ModelInfo's
};

/// Cost: reads every weight once; holds one matrix in host memory at a time.
/// \throws ModelError naming a missing tensor, or one of another shape than the configuration says; c10::Error: too little memory
TorchWeights load_torch_weights(const WeightSource& source, const ModelConfig& config, at::ScalarType dtype, const at::Device& device);

/// What "auto" is for this file.
at::ScalarType dtype_of_file(const WeightSource& source, const ModelConfig& config);

}  // namespace unshard::inference
