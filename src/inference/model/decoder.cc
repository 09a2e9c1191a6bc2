// Shapes: T rows of this step, D hidden, H query heads, K key-value heads, S head size, F intermediate, V vocabulary.
#include "inference/model/decoder.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "inference/kernels/rows.h"
#include "unshard/core/error.h"

namespace unshard::inference {

void Batch::clear() {
  tokens.clear();
  positions.clear();
  spans.clear();
  logit_rows.clear();
}

void Batch::add(std::span<const Token> more, std::int64_t position, const std::int32_t* blocks) {
  const auto rows = static_cast<std::int64_t>(more.size());
  spans.push_back({static_cast<std::int64_t>(tokens.size()), rows, position, blocks});
  tokens.insert(tokens.end(), more.begin(), more.end());
  for (std::int64_t i = 0; i < rows; ++i) positions.push_back(static_cast<std::int32_t>(position + i));
}

Decoder::Decoder(std::unique_ptr<WeightSource> source, ModelConfig config, const std::string& dtype, std::int64_t context, Workers& workers,
                 std::shared_ptr<Peers> peers, const MemoryBudget& budget)
    : source_(std::move(source)), config_(std::move(config)), workers_(workers), peers_(std::move(peers)) {
  const Shard shard = peers_ ? Shard{peers_->rank(), peers_->size()} : Shard{};
  require(shard.size <= config_.kv_heads, "[inference.engine] ", shard.size, " ranks can't share ", config_.kv_heads,
          " key-value heads; use at most as many ranks");
  auto loaded = load_within(budget, *source_, config_, dtype, shard, workers_);
  weights_ = std::move(loaded.weights);
  stream_ = std::move(loaded.stream);
  kv_heads_ = shard.of(config_.kv_heads).size();
  heads_ = kv_heads_ * (config_.heads / config_.kv_heads);
  if (config_.attention_scale == 0) config_.attention_scale = 1 / std::sqrt(static_cast<float>(config_.head_size));
  for (auto [rope, from] : {std::pair{&rope_, &config_.rope}, {&local_rope_, &config_.local_rope}}) {
    rope->config = *from;
    if (from->kind != RopeKind::none && from->rotary > 0) rope_tables(*from, context, context, rope->cos, rope->sin);
  }
}

namespace {
/// Features inside the widest MLP that there is, on this rank.
std::int64_t widest_inner(const ModelWeights& weights, bool shared_expert) {
  std::int64_t widest = 0;
  const auto see = [&](const MlpWeights& mlp) { widest = std::max(widest, mlp.down.matrix.cols()); };
  for (const auto& layer : weights.layers) {
    if (layer.dense) {
      see(layer.mlp);
      continue;
    }
    for (const auto& expert : layer.experts.experts) see(expert);
    if (shared_expert) see(layer.experts.shared);
  }
  return widest;
}
}  // namespace

void Decoder::resize(std::int64_t tokens) {
  if (tokens <= capacity_) return;
  const auto rows = static_cast<std::size_t>(tokens);
  const auto width = [&](std::int64_t n) { return rows * static_cast<std::size_t>(n); };
  x_.resize(width(config_.hidden));
  normed_.resize(width(config_.hidden));
  branch_.resize(width(config_.hidden));
  qkv_.resize(width((heads_ + 2 * kv_heads_) * config_.head_size));
  attended_.resize(width(heads_ * config_.head_size));
  inner_.resize(width(widest_inner(weights_, config_.experts.shared_intermediate > 0)));
  capacity_ = tokens;  // last: what was thrown for want of memory is tried again
}

void Decoder::embed(const Batch& batch) {
  const auto width = config_.hidden;
  workers_.parallel_for(static_cast<std::int64_t>(batch.tokens.size()), 16, [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> place(config_.learned_positions ? static_cast<std::size_t>(width) : 0);
    for (std::int64_t t = begin; t < end; ++t) {
      float* row = x_.data() + t * width;
      expand_row(weights_.embedding, batch.tokens[static_cast<std::size_t>(t)], row);
      if (config_.embedding_scale != 1)
        for (std::int64_t i = 0; i < width; ++i) row[i] *= config_.embedding_scale;
      if (place.empty()) continue;
      expand_row(weights_.positions, batch.positions[static_cast<std::size_t>(t)], place.data());
      for (std::int64_t i = 0; i < width; ++i) row[i] += place[static_cast<std::size_t>(i)];
    }
  });
}

void Decoder::normalise(const NormWeights& norm, const float* x, float* out, std::int64_t tokens) {
  const auto width = config_.hidden;
  if (config_.norm == NormKind::rms)
    rms_norm(x, width, norm.weight.data(), config_.norm_offset, config_.norm_eps, out, width, tokens, width, workers_);
  else
    layer_norm(x, width, norm.weight.data(), norm.bias.empty() ? nullptr : norm.bias.data(), config_.norm_eps, out, width, tokens, width,
               workers_);
}

void Decoder::norm_heads(const LayerWeights& layer, std::int64_t tokens) {
  const auto size = config_.head_size, stride = (heads_ + 2 * kv_heads_) * size;
  const auto norm = [&](const NormWeights& weights, std::int64_t first, std::int64_t heads) {
    for (std::int64_t head = first; head < first + heads; ++head)
      rms_norm(qkv_.data() + head * size, stride, weights.weight.data(), config_.norm_offset, config_.norm_eps, qkv_.data() + head * size,
               stride, tokens, size, workers_);
  };
  if (layer.q_norm.there()) norm(layer.q_norm, 0, heads_);
  if (layer.k_norm.there()) norm(layer.k_norm, heads_, kv_heads_);
}

void Decoder::rotate(const LayerWeights& layer, const Batch& batch) {
  const Rope& rope = layer.local_rope ? local_rope_ : rope_;
  if (rope.config.kind == RopeKind::none) return;
  // Queries and keys lie side by side: one pass over both.
  unshard::inference::rope(qkv_.data(), (heads_ + 2 * kv_heads_) * config_.head_size, heads_ + kv_heads_, config_.head_size,
                           rope.config.rotary, batch.positions.data(), rope.cos.data(), rope.sin.data(),
                           static_cast<std::int64_t>(batch.tokens.size()), workers_);
}

void Decoder::attend(const LayerWeights& layer, const KvLayer& cache, const Batch& batch) {
  const auto tokens = static_cast<std::int64_t>(batch.tokens.size());
  const auto q_width = heads_ * config_.head_size, kv_width = kv_heads_ * config_.head_size, stride = q_width + 2 * kv_width;
  multiply(layer.qkv.matrix, in_, qkv_.data(), stride, {layer.qkv.bias_data(), false}, workers_);
  norm_heads(layer, tokens);
  rotate(layer, batch);
  kv_store(cache, batch.spans, qkv_.data() + q_width, qkv_.data() + q_width + kv_width, stride, workers_);
  attention(cache, batch.spans, qkv_.data(), stride, heads_, attended_.data(), q_width,
            {config_.attention_scale, layer.window, config_.attention_softcap}, workers_);
  out_.assign(attended_.data(), tokens, q_width, q_width, layer.attention_output.matrix.type(), workers_);
  add_linear(layer.post_attention_norm, layer.attention_output, out_, tokens);
}

/// x += linear(input), or x += norm(linear(input)) where the family norms a branch before it joins.
void Decoder::add_linear(const NormWeights& post_norm, const Linear& linear, Activations& input, std::int64_t tokens) {
  const bool direct = !post_norm.there() && !peers_;
  multiply(linear.matrix, input, direct ? x_.data() : branch_.data(), config_.hidden, {linear.bias_data(), direct}, workers_);
  if (!direct) add_branch(post_norm, tokens);
}

/// x += norm(branch), the branch first summed over ranks.
void Decoder::add_branch(const NormWeights& post_norm, std::int64_t tokens) {
  if (peers_) peers_->all_reduce(branch_.data(), tokens * config_.hidden);
  if (post_norm.there()) normalise(post_norm, branch_.data(), branch_.data(), tokens);
  workers_.parallel_for(tokens * config_.hidden, 1 << 14, [&](std::int64_t begin, std::int64_t end) {
    float* x = x_.data();
    const float* branch = branch_.data();
    for (std::int64_t i = begin; i < end; ++i) x[i] += branch[i];
  });
}

void Decoder::mlp(const MlpWeights& weights, Activations& x, float* out, bool accumulate, std::int64_t tokens) {
  const std::int64_t inner = weights.down.matrix.cols();  // of this rank
  if (config_.gated) {
    multiply_gated(weights.in.matrix, x, config_.activation, inner_.data(), inner, {weights.in.bias_data(), false}, workers_);
  } else {
    multiply(weights.in.matrix, x, inner_.data(), inner, {weights.in.bias_data(), false}, workers_);
    gelu(inner_.data(), tokens * inner, config_.activation == Gate::gelu_tanh, workers_);
  }
  inner_in_.assign(inner_.data(), tokens, inner, inner, weights.down.matrix.type(), workers_);
  multiply(weights.down.matrix, inner_in_, out, config_.hidden, {weights.down.bias_data(), accumulate}, workers_);
}

void Decoder::feed_forward(const LayerWeights& layer, std::int64_t tokens) {
  const bool direct = layer.dense && !layer.post_mlp_norm.there() && !peers_;
  if (layer.mlp_norm.there()) normalise(layer.mlp_norm, x_.data(), normed_.data(), tokens);
  if (layer.dense) {
    // Phi's MLP reads what attention read, which in_ still holds.
    if (layer.mlp_norm.there() || layer.mlp.in.matrix.type() != layer.qkv.matrix.type())
      in_.assign(normed_.data(), tokens, config_.hidden, config_.hidden, layer.mlp.in.matrix.type(), workers_);
    mlp(layer.mlp, in_, direct ? x_.data() : branch_.data(), direct, tokens);
  } else {
    mixture(layer.experts, tokens, branch_.data());
  }
  if (!direct) add_branch(layer.post_mlp_norm, tokens);
}

void Decoder::project(const Batch& batch, std::vector<float>& logits) {
  const auto width = config_.hidden, rows = static_cast<std::int64_t>(batch.logit_rows.size());
  few_.resize(static_cast<std::size_t>(rows * width));
  for (std::int64_t i = 0; i < rows; ++i)
    std::memcpy(few_.data() + i * width, x_.data() + batch.logit_rows[static_cast<std::size_t>(i)] * width,
                sizeof(float) * static_cast<std::size_t>(width));
  normalise(weights_.final_norm, few_.data(), few_.data(), rows);
  in_.assign(few_.data(), rows, width, width, weights_.outputs.front().linear.matrix.type(), workers_);
  logits.resize(static_cast<std::size_t>(rows * config_.vocab));
  if (peers_) std::fill(logits.begin(), logits.end(), 0.0f);
  for (std::size_t i = 0; i < weights_.outputs.size(); ++i) {
    const auto& [linear, first] = weights_.outputs[i];
    if (stream_) stream_->use(static_cast<std::int64_t>(weights_.layers.size() + i));
    multiply(linear.matrix, in_, logits.data() + first, config_.vocab, {linear.bias_data(), false}, workers_);
  }
  if (peers_) peers_->all_reduce(logits.data(), static_cast<std::int64_t>(logits.size()));
  if (config_.logit_softcap == 0) return;
  workers_.parallel_for(static_cast<std::int64_t>(logits.size()), 1 << 14, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i)
      logits[static_cast<std::size_t>(i)] = config_.logit_softcap * std::tanh(logits[static_cast<std::size_t>(i)] / config_.logit_softcap);
  });
}

void Decoder::forward(const Batch& batch, KvCache& cache, std::vector<float>& logits) {
  const auto tokens = static_cast<std::int64_t>(batch.tokens.size());
  resize(tokens);
  embed(batch);
  if (stream_) stream_->begin(batch.logit_rows.empty() ? config_.layers : stream_->units());
  for (std::size_t i = 0; i < weights_.layers.size(); ++i) {
    const LayerWeights& layer = weights_.layers[i];
    if (stream_) stream_->use(static_cast<std::int64_t>(i));
    normalise(layer.attention_norm, x_.data(), normed_.data(), tokens);
    in_.assign(normed_.data(), tokens, config_.hidden, config_.hidden, layer.qkv.matrix.type(), workers_);
    attend(layer, cache.layer(static_cast<std::int64_t>(i)), batch);
    feed_forward(layer, tokens);  // Phi's reads what attention read: in_ still holds it
  }
  logits.clear();
  if (!batch.logit_rows.empty()) project(batch, logits);
  if (stream_) stream_->end();
}

}  // namespace unshard::inference
