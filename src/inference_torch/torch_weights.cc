#include "inference_torch/torch_weights.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <array>
#include <cstring>

#include "inference/model/tensor_reader.h"
#include "unshard/core/error.h"
#include "unshard/inference/engine.h"

namespace unshard::inference {
namespace {

at::ScalarType scalar_type(FileType type) { return type == FileType::f32 ? at::kFloat : type == FileType::f16 ? at::kHalf : at::kBFloat16; }
bool is_plain(FileType type) { return type == FileType::f32 || type == FileType::f16 || type == FileType::bf16; }

class Loader {
 public:
  Loader(const WeightSource& source, const ModelConfig& config, at::ScalarType dtype, const at::Device& device)
      : reader_(source, config), config_(config), names_(config.names), dtype_(dtype), device_(device) {}

  TorchWeights load() {
    TorchWeights weights;
    weights.embedding = matrix(table(names_.embedding, config_.vocab), dtype_);
    if (config_.learned_positions) weights.positions = matrix(table(names_.positions, config_.context), dtype_);
    weights.final_norm = norm(names_.final_norm, config_.hidden);
    for (std::int64_t i = 0; i < config_.layers; ++i) weights.layers.push_back(layer(i));
    const bool tied = !config_.untied && !reader_.has(names_.output);
    weights.output.weight = tied ? weights.embedding : matrix(table(names_.output, config_.vocab), dtype_);
    weights.output.bias = bias({reader_.vector(names_.output, ".bias", config_.vocab)}, dtype_);
    weights.bytes = bytes_;
    weights.parameters = parameters_;
    weights.unread = reader_.unread();
    return weights;
  }

 private:
  /// On the device, and counted.
  at::Tensor placed(const at::Tensor& host, at::ScalarType dtype) {
    auto tensor = host.to(device_, dtype);
    bytes_ += static_cast<std::int64_t>(tensor.nbytes());
    parameters_ += tensor.numel();
    return tensor;
  }
  static at::Tensor on_host(const WeightView& view) {
    auto tensor = at::empty({view.rows, view.cols}, is_plain(view.type) ? scalar_type(view.type) : at::kFloat);
    if (is_plain(view.type)) {
      std::memcpy(tensor.data_ptr(), view.data, tensor.nbytes());
    } else {
      auto* values = tensor.data_ptr<float>();
      for (std::int64_t r = 0; r < view.rows; ++r) expand_row(view, r, values + r * view.cols);
    }
    return tensor;
  }
  /// The rows of all `parts`, one after another.
  at::Tensor matrix(const std::vector<WeightView>& parts, at::ScalarType dtype) {
    std::vector<at::Tensor> tensors;
    for (const auto& part : parts) tensors.push_back(placed(on_host(part), dtype));
    reader_.drop_made();
    return tensors.size() == 1 ? tensors.front() : at::cat(tensors);
  }
  at::Tensor matrix(const WeightView& view, at::ScalarType dtype) { return matrix(std::vector{view}, dtype); }
  at::Tensor vector(const std::vector<float>& values, at::ScalarType dtype) {
    auto tensor = at::empty({static_cast<std::int64_t>(values.size())}, at::kFloat);
    if (!values.empty()) std::memcpy(tensor.data_ptr(), values.data(), tensor.nbytes());
    return placed(tensor, dtype);
  }
  /// Parts one after another: of all, or of none (undefined then). \throws ModelError
  at::Tensor bias(const std::vector<std::vector<float>>& parts, at::ScalarType dtype) {
    std::vector<float> joined;
    std::size_t there = 0;
    for (const auto& part : parts) {
      joined.insert(joined.end(), part.begin(), part.end());
      there += part.empty() ? 0 : 1;
    }
    if (there == 0) return {};
    if (there != parts.size()) throw ModelError(cat(reader_.path(), ": some of the matrices that are computed together have a bias"));
    return vector(joined, dtype);
  }

  /// Stored [rows, hidden] in every family.
  WeightView table(const std::string& name, std::int64_t rows) {
    if (!config_.transposed) return reader_.matrix(name, rows, config_.hidden);
    const WeightView* view = reader_.find(name, ".weight");
    if (!view || view->cols != config_.hidden || view->rows != rows)
      throw ModelError(cat(reader_.path(), ": '", name, ".weight' is missing, or isn't [", rows, ", ", config_.hidden, "]"));
    return *view;
  }

  TorchNorm norm(const std::string& name, std::int64_t width) {
    if (name.empty()) return {};
    auto values = reader_.needed_vector(name, width);
    for (auto& value : values) value += config_.norm_offset;
    return {vector(values, at::kFloat), bias({reader_.vector(name, ".bias", width)}, at::kFloat)};
  }

  TorchLinear linear(const std::string& name, std::int64_t rows, std::int64_t cols) {
    return {matrix(reader_.matrix(name, rows, cols), dtype_), bias({reader_.vector(name, ".bias", rows)}, dtype_)};
  }
  TorchLinear router(const std::string& name, std::int64_t rows) {
    return {matrix(reader_.matrix(name, rows, config_.hidden), at::kFloat), {}};
  }

  TorchLinear qkv(std::int64_t i) {
    const std::int64_t size = config_.head_size, all = (config_.heads + 2 * config_.kv_heads) * size;
    if (!names_.qkv.empty()) return linear(TensorReader::name(names_.qkv, i), all, config_.hidden);
    std::vector<WeightView> parts;
    std::vector<std::vector<float>> biases;
    for (const auto& [pattern, heads] :
         {std::pair{&names_.q, config_.heads}, {&names_.k, config_.kv_heads}, {&names_.v, config_.kv_heads}}) {
      const auto name = TensorReader::name(*pattern, i);
      auto view = reader_.matrix(name, heads * size, config_.hidden);
      auto part = reader_.vector(name, ".bias", heads * size);
      if (config_.interleaved_qk && pattern != &names_.v) {
        view = reader_.half_split(view, heads);
        if (!part.empty()) TensorReader::half_split(part, heads);
      }
      parts.push_back(view);
      biases.push_back(std::move(part));
    }
    return {matrix(parts, dtype_), bias(biases, dtype_)};
  }

  TorchMlp mlp(const std::string& gate, const std::string& up, const std::string& down, const std::string& gate_up,
               std::int64_t intermediate) {
    TorchMlp out;
    if (!config_.gated)
      out.in = linear(up, intermediate, config_.hidden);
    else if (!gate_up.empty())
      out.in = linear(gate_up, 2 * intermediate, config_.hidden);
    else
      out.in = {matrix({reader_.matrix(gate, intermediate, config_.hidden), reader_.matrix(up, intermediate, config_.hidden)}, dtype_),
                bias({reader_.vector(gate, ".bias", intermediate), reader_.vector(up, ".bias", intermediate)}, dtype_)};
    out.down = linear(down, config_.hidden, intermediate);
    return out;
  }

  TorchExperts experts(std::int64_t i) {
    const auto& sizes = config_.experts;
    TorchExperts out;
    out.router = router(TensorReader::name(names_.router, i), sizes.experts);
    const bool stacked = names_.experts_in_one();
    const auto one = [&](const std::string& name, std::int64_t e, std::int64_t rows, std::int64_t cols) {
      return TensorReader::part(reader_.matrix(name, sizes.experts * rows, cols), e * rows, rows);
    };
    for (std::int64_t e = 0; e < sizes.experts; ++e) {
      const auto gate = TensorReader::name(names_.expert_gate, i, e), up = TensorReader::name(names_.expert_up, i, e),
                 down = TensorReader::name(names_.expert_down, i, e);
      if (!stacked) {
        out.experts.push_back(mlp(gate, up, down, "", sizes.intermediate));
        continue;
      }
      TorchMlp expert;
      expert.in.weight = matrix({one(gate, e, sizes.intermediate, config_.hidden), one(up, e, sizes.intermediate, config_.hidden)}, dtype_);
      expert.down.weight = matrix(one(down, e, config_.hidden, sizes.intermediate), dtype_);
      out.experts.push_back(std::move(expert));
    }
    if (sizes.shared_intermediate == 0) return out;
    out.shared = mlp(TensorReader::name(names_.shared_gate, i), TensorReader::name(names_.shared_up, i),
                     TensorReader::name(names_.shared_down, i), "", sizes.shared_intermediate);
    out.shared_switch = router(TensorReader::name(names_.shared_switch, i), 1);
    return out;
  }

  TorchLayer layer(std::int64_t i) {
    const auto name = [&](const std::string& pattern) { return pattern.empty() ? pattern : TensorReader::name(pattern, i); };
    TorchLayer layer;
    layer.attention_norm = norm(name(names_.attention_norm), config_.hidden);
    layer.q_norm = norm(name(names_.q_norm), config_.head_size);
    layer.k_norm = norm(name(names_.k_norm), config_.head_size);
    layer.post_attention_norm = norm(name(names_.post_attention_norm), config_.hidden);
    layer.mlp_norm = norm(name(names_.mlp_norm), config_.hidden);
    layer.post_mlp_norm = norm(name(names_.post_mlp_norm), config_.hidden);
    layer.qkv = qkv(i);
    layer.attention_output = linear(name(names_.attention_output), config_.hidden, config_.heads * config_.head_size);
    layer.dense = !config_.experts.in_layer(i);
    if (layer.dense)
      layer.mlp = mlp(name(names_.gate), name(names_.up), name(names_.down), name(names_.gate_up), config_.intermediate);
    else
      layer.experts = experts(i);
    layer.window = config_.window_of(i);
    layer.local_rope = config_.has_local_rope_in(i);
    return layer;
  }

  TensorReader reader_;
  const ModelConfig& config_;
  const TensorNames& names_;
  const at::ScalarType dtype_;
  const at::Device device_;
  std::int64_t bytes_ = 0, parameters_ = 0;
};

}  // namespace

TorchWeights load_torch_weights(const WeightSource& source, const ModelConfig& config, at::ScalarType dtype, const at::Device& device) {
  return Loader(source, config, dtype, device).load();
}

at::ScalarType dtype_of_file(const WeightSource& source, const ModelConfig& config) {
  const TensorReader reader(source, config);
  const auto& names = config.names;
  const WeightView* first = reader.find(TensorReader::name(names.qkv.empty() ? names.q : names.qkv, 0), ".weight");
  return first != nullptr && is_plain(first->type) ? scalar_type(first->type) : at::kBFloat16;
}

}  // namespace unshard::inference
