#pragma once
// A decoder by LibTorch's operators. The same steps as Decoder's (inference/model/decoder.h), where each is explained.
#include "inference/model/decoder.h"
#include "inference/model/step_model.h"
#include "inference_torch/torch_attention.h"
#include "inference_torch/torch_weights.h"

namespace unshard::inference {

class TorchModel : public StepModel {
 public:
  /// \throws ModelError, c10::Error
  TorchModel(const WeightSource& source, ModelConfig config, at::ScalarType dtype, at::ScalarType kv_dtype, std::int64_t context,
             const at::Device& device);

  const ModelConfig& config() const override { return config_; }
  ModelFacts facts() const override;
  std::unique_ptr<StepCache> new_cache(std::int64_t blocks) const override;
  void forward(const Batch& batch, StepCache& cache, std::vector<float>& logits) override;

 private:
  /// Rows of cos and sin, [T, 1, rotary / 2].
  struct Rotation {
    at::Tensor cos, sin;
  };
  struct Rope {
    RopeConfig config;
    at::Tensor cos, sin;  ///< [positions, rotary / 2]
    Rotation at(const at::Tensor& positions) const;
  };
  at::Tensor embed(const at::Tensor& tokens, const at::Tensor& positions) const;
  at::Tensor normalise(const TorchNorm& norm, const at::Tensor& x) const;
  at::Tensor attend(const TorchLayer& layer, const at::Tensor& normed, const Rotation& rotation, const at::Tensor& keys,
                    const at::Tensor& values, TorchAttention& attention) const;
  at::Tensor mlp(const TorchMlp& weights, const at::Tensor& x) const;
  at::Tensor mixture(const TorchExperts& weights, const at::Tensor& normed) const;
  void compute(const Batch& batch, StepCache& cache, std::vector<float>& logits) const;
  void project(const at::Tensor& x, const Batch& batch, std::vector<float>& logits) const;

  ModelConfig config_;
  const at::ScalarType dtype_, kv_dtype_;
  const at::Device device_;
  TorchWeights weights_;
  Rope rope_, local_rope_;
};

}  // namespace unshard::inference
