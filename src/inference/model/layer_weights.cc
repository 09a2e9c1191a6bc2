#include "inference/model/layer_weights.h"

#include <algorithm>
#include <array>
#include <map>

#include "unshard/core/error.h"
#include "unshard/inference/engine.h"

namespace unshard::inference {
namespace {

WeightView rows(const WeightView& view, Range range) { return TensorReader::part(view, range.begin, range.size()); }

std::vector<float> slice(const std::vector<float>& values, Range range) {
  if (values.empty()) return {};
  return {values.begin() + range.begin, values.begin() + range.end};
}

/// What packing refuses is the file's fault here.
template <class F>
auto of_file(const std::string& path, F&& f) {
  try {
    return f();
  } catch (const std::invalid_argument& error) {
    throw ModelError(cat(path, ": ", error.what()));
  }
}

}  // namespace

MakeMatrix pack_with(Workers& workers) {
  return [&workers](std::span<const WeightView> parts, WeightType type, bool gated) {
    return gated ? Matrix::pack_gated(parts[0], parts[1], type, workers) : Matrix::pack(parts, type, workers);
  };
}

WeightLoader::WeightLoader(const WeightSource& source, const ModelConfig& config, std::string dtype, const Shard& shard, MakeMatrix make,
                           bool values)
    : reader_(source, config, values),
      config_(config),
      names_(config.names),
      dtype_(std::move(dtype)),
      shard_(shard),
      make_(std::move(make)) {}

ModelWeights WeightLoader::frame() {
  ModelWeights weights;
  weights.embedding = embedding(names_.embedding, config_.vocab);
  if (config_.learned_positions) weights.positions = embedding(names_.positions, config_.context);
  weights.final_norm = norm(names_.final_norm, config_.hidden);
  return weights;
}

LayerWeights WeightLoader::layer(std::int64_t i) {
  return of_file(reader_.path(), [&] { return read_layer(i); });
}

OutputPart WeightLoader::output(Range wanted) {
  return of_file(reader_.path(), [&] {
    // The last matrix decides between near tokens: in eight bits where the others have four, or where inputs are rounded a row at a time.
    if (dtype_ == "int4" || dtype_ == "w8a8") dtype_ = "int8";
    OutputPart part;
    part.first = wanted.begin;
    part.linear = linear({rows(embedding(tied() ? names_.embedding : names_.output, config_.vocab), wanted)});
    part.linear.bias = slice(reader_.vector(names_.output, ".bias", config_.vocab), wanted);
    return part;
  });
}

void WeightLoader::sum_up(ModelWeights& weights) const {
  weights.bytes = bytes_;
  weights.parameters = parameters_ * shard_.size + (tied() ? 0 : weights.embedding.rows * weights.embedding.cols);  // of all ranks, nearly
  weights.unread = reader_.unread();
}

WeightView WeightLoader::embedding(const std::string& name, std::int64_t rows) {
  if (!config_.transposed) return reader_.matrix(name, rows, config_.hidden);
  const WeightView* view = reader_.find(name, ".weight");  // stored [vocab, hidden] in every family
  if (!view || view->cols != config_.hidden || view->rows != rows)
    throw ModelError(cat(reader_.path(), ": '", name, ".weight' is missing, or isn't [", rows, ", ", config_.hidden, "]"));
  return *view;
}

NormWeights WeightLoader::norm(const std::string& name, std::int64_t width) {
  if (name.empty()) return {};
  parameters_ += width;
  return {reader_.needed_vector(name, width), reader_.vector(name, ".bias", width)};
}

Linear WeightLoader::linear(std::span<const WeightView> parts, WeightType type, bool gated) {
  Linear linear;
  linear.matrix = make_(parts, type, gated);
  bytes_ += linear.matrix.bytes();
  parameters_ += linear.matrix.rows() * linear.matrix.cols();
  reader_.drop_made();
  return linear;
}

/// The bias of a sum over ranks is added once.
std::vector<float> WeightLoader::bias_of_sum(const std::string& name) const {
  return shard_.rank == 0 ? reader_.vector(name, ".bias", config_.hidden) : std::vector<float>{};
}

/// Features of an MLP, in whole groups of what may be quantised in groups.
Range WeightLoader::features(std::int64_t intermediate) const { return shard_.of(intermediate, intermediate % 32 == 0 ? 32 : 1); }

Linear WeightLoader::router(const std::string& name, std::int64_t rows) {
  return linear(std::array{reader_.matrix(name, rows, config_.hidden)}, WeightType::f32);
}

/// Files quantise what is packed together differently now and then: then the widest type is used for all.
WeightType WeightLoader::type_of(std::span<const WeightView> views) const {
  auto widest = type_of(views.front());
  for (const auto& view : views) widest = std::min(widest, type_of(view));
  return widest;
}

WeightType WeightLoader::type_of(const WeightView& view) const {
  const auto type = weight_type_for(dtype_, view.type);
  const bool grouped = type == WeightType::q4 || type == WeightType::q8;
  return grouped && view.cols % 32 != 0 ? WeightType::bf16 : type;  // rows that aren't whole groups
}

Linear WeightLoader::qkv(std::int64_t i) {
  const std::int64_t size = config_.head_size, group = config_.heads / config_.kv_heads;
  const Range kv = shard_.of(config_.kv_heads);
  std::vector<WeightView> parts;
  std::vector<float> bias;
  const bool fused = !names_.qkv.empty();
  const std::int64_t fused_rows = (config_.heads + 2 * config_.kv_heads) * size;
  std::int64_t first = 0;  // row of a fused matrix, which is read once: GPT-2's is turned
  const auto together = fused ? reader_.matrix(TensorReader::name(names_.qkv, i), fused_rows, config_.hidden) : WeightView{};
  for (const auto& [pattern, heads] : {std::pair{&names_.q, config_.heads}, {&names_.k, config_.kv_heads}, {&names_.v, config_.kv_heads}}) {
    const bool turned = config_.interleaved_qk && pattern != &names_.v;
    const auto name = TensorReader::name(fused ? names_.qkv : *pattern, i);
    const auto all = fused ? fused_rows : heads * size;
    const auto whole = fused ? together : reader_.matrix(name, all, config_.hidden);
    auto view = TensorReader::part(whole, first, heads * size);
    if (turned) view = reader_.half_split(view, heads);
    auto part = reader_.vector(name, ".bias", all);
    if (!part.empty()) part = slice(part, {first, first + heads * size});
    if (turned && !part.empty()) TensorReader::half_split(part, heads);
    const bool query = pattern == &names_.q;
    const Range mine = query ? Range{kv.begin * group * size, kv.end * group * size} : Range{kv.begin * size, kv.end * size};
    parts.push_back(rows(view, mine));
    part = slice(part, mine);
    bias.insert(bias.end(), part.begin(), part.end());
    if (fused) first += heads * size;
  }
  auto joined = linear(parts);
  if (!bias.empty() && static_cast<std::int64_t>(bias.size()) != joined.matrix.rows())
    throw ModelError(cat(reader_.path(), ": layer ", i, " has biases for some of q, k and v only"));
  joined.bias = std::move(bias);
  return joined;
}

MlpWeights WeightLoader::mlp(const std::string& gate, const std::string& up, const std::string& down, const std::string& gate_up,
                             std::int64_t intermediate) {
  const Range mine = features(intermediate);
  MlpWeights out;
  if (!config_.gated) {
    out.in = linear({rows(reader_.matrix(up, intermediate, config_.hidden), mine)});
    out.in.bias = slice(reader_.vector(up, ".bias", intermediate), mine);
  } else {
    const bool fused = !gate_up.empty();
    const auto both = fused ? reader_.matrix(gate_up, 2 * intermediate, config_.hidden) : WeightView{};
    const auto g = fused ? TensorReader::part(both, 0, intermediate) : reader_.matrix(gate, intermediate, config_.hidden);
    const auto u = fused ? TensorReader::part(both, intermediate, intermediate) : reader_.matrix(up, intermediate, config_.hidden);
    out.in = gated(rows(g, mine), rows(u, mine));
    const auto gate_bias = gated_bias(fused ? gate_up : gate, 0, fused, intermediate, mine);
    const auto up_bias = gated_bias(fused ? gate_up : up, fused ? intermediate : 0, fused, intermediate, mine);
    if (gate_bias.size() != up_bias.size()) throw ModelError(cat(reader_.path(), ": one of '", gate, "' and '", up, "' has a bias"));
    out.in.bias = gate_bias;
    out.in.bias.insert(out.in.bias.end(), up_bias.begin(), up_bias.end());
  }
  out.down = linear({reader_.columns(reader_.matrix(down, config_.hidden, intermediate), mine)});
  out.down.bias = bias_of_sum(down);
  return out;
}

/// This rank's part of gate's or up's bias, which begins at `first` of a fused one.
std::vector<float> WeightLoader::gated_bias(const std::string& name, std::int64_t first, bool fused, std::int64_t intermediate,
                                            Range mine) const {
  return slice(reader_.vector(name, ".bias", fused ? 2 * intermediate : intermediate), {first + mine.begin, first + mine.end});
}

Linear WeightLoader::gated(const WeightView& gate, const WeightView& up) {
  const std::array both{gate, up};
  return linear(both, type_of(both), true);
}

ExpertWeights WeightLoader::experts(std::int64_t i) {
  const auto& sizes = config_.experts;
  ExpertWeights out;
  out.router = router(TensorReader::name(names_.router, i), sizes.experts);
  const bool stacked = names_.experts_in_one();
  for (std::int64_t e = 0; e < sizes.experts; ++e) {
    const auto gate = TensorReader::name(names_.expert_gate, i, e), up = TensorReader::name(names_.expert_up, i, e),
               down = TensorReader::name(names_.expert_down, i, e);
    if (!stacked) {
      out.experts.push_back(mlp(gate, up, down, "", sizes.intermediate));
      continue;
    }
    const auto one = [&](const std::string& name, std::int64_t rows, std::int64_t cols) {
      return TensorReader::part(reader_.matrix(name, sizes.experts * rows, cols), e * rows, rows);
    };
    MlpWeights expert;
    const Range mine = features(sizes.intermediate);
    expert.in = gated(rows(one(gate, sizes.intermediate, config_.hidden), mine), rows(one(up, sizes.intermediate, config_.hidden), mine));
    expert.down = linear({reader_.columns(one(down, config_.hidden, sizes.intermediate), mine)});
    out.experts.push_back(std::move(expert));
  }
  if (sizes.shared_intermediate == 0) return out;
  out.shared = mlp(TensorReader::name(names_.shared_gate, i), TensorReader::name(names_.shared_up, i),
                   TensorReader::name(names_.shared_down, i), "", sizes.shared_intermediate);
  out.shared_switch = router(TensorReader::name(names_.shared_switch, i), 1);
  return out;
}

LayerWeights WeightLoader::read_layer(std::int64_t i) {
  const auto name = [&](const std::string& pattern) { return pattern.empty() ? pattern : TensorReader::name(pattern, i); };
  LayerWeights layer;
  layer.attention_norm = norm(name(names_.attention_norm), config_.hidden);
  layer.q_norm = norm(name(names_.q_norm), config_.head_size);
  layer.k_norm = norm(name(names_.k_norm), config_.head_size);
  layer.post_attention_norm = norm(name(names_.post_attention_norm), config_.hidden);
  layer.mlp_norm = norm(name(names_.mlp_norm), config_.hidden);
  layer.post_mlp_norm = norm(name(names_.post_mlp_norm), config_.hidden);
  layer.qkv = qkv(i);
  const auto output = name(names_.attention_output);
  const Range kv = shard_.of(config_.kv_heads);
  const std::int64_t each = config_.heads / config_.kv_heads * config_.head_size;  // features a KV head
  layer.attention_output = linear(
      {reader_.columns(reader_.matrix(output, config_.hidden, config_.heads * config_.head_size), {kv.begin * each, kv.end * each})});
  layer.attention_output.bias = bias_of_sum(output);
  layer.dense = !config_.experts.in_layer(i);
  if (layer.dense)
    layer.mlp = mlp(name(names_.gate), name(names_.up), name(names_.down), name(names_.gate_up), config_.intermediate);
  else
    layer.experts = experts(i);
  layer.window = config_.window_of(i);
  layer.local_rope = config_.has_local_rope_in(i);
  return layer;
}

WeightType weight_type_for(const std::string& dtype, FileType type) {
  static const std::map<std::string, WeightType> asked = {{"fp32", WeightType::f32}, {"fp16", WeightType::f16}, {"bf16", WeightType::bf16},
                                                          {"int8", WeightType::q8},  {"int4", WeightType::q4},  {"w8a8", WeightType::w8a8}};
  if (const auto found = asked.find(dtype); found != asked.end()) return found->second;
  switch (type) {
    case FileType::f32:
      return WeightType::f32;
    case FileType::f16:
      return WeightType::f16;
    case FileType::bf16:
      return WeightType::bf16;
    case FileType::q4_0:
    case FileType::q4_1:
    case FileType::q4_k:
      return WeightType::q4;
    default:
      return WeightType::q8;
  }
}

ModelWeights load_weights(const WeightSource& source, const ModelConfig& config, const std::string& dtype, const Shard& shard,
                          Workers& workers) {
  WeightLoader loader(source, config, dtype, shard, pack_with(workers));
  auto weights = loader.frame();
  for (std::int64_t i = 0; i < config.layers; ++i) weights.layers.push_back(loader.layer(i));
  weights.outputs.push_back(loader.output(loader.vocabulary()));
  loader.sum_up(weights);
  return weights;
}

}  // namespace unshard::inference
