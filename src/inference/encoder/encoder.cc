// Shapes: T rows of this batch, D hidden, H heads, S head size, F intermediate.
// Source: BERT, arXiv 1810.04805: each branch is added to its input, and the sum normalised.
#include "inference/encoder/encoder.h"

#include <cmath>
#include <numeric>

#include "inference/kernels/rows.h"

namespace unshard::inference {
namespace {
std::int64_t blocks_for(std::int64_t tokens) { return (tokens + kBlockTokens - 1) / kBlockTokens; }
}  // namespace

Encoder::Encoder(std::unique_ptr<WeightSource> source, EncoderConfig config, const std::string& dtype, Workers& workers)
    : source_(std::move(source)), config_(std::move(config)), workers_(workers) {
  weights_ = load_encoder(*source_, config_, dtype, workers_);
}

/// Tokens one after another, and where each stands in its text.
void Encoder::place(std::span<const std::span<const Token>> texts) {
  tokens_.clear(), places_.clear(), spans_.clear();
  std::int64_t blocks = 0;
  for (const auto& text : texts) {
    const auto rows = static_cast<std::int64_t>(text.size());
    spans_.push_back({static_cast<std::int64_t>(tokens_.size()), rows, 0, nullptr});
    tokens_.insert(tokens_.end(), text.begin(), text.end());
    std::int64_t next = config_.first_position;
    for (const Token token : text) places_.push_back(token == config_.padding ? config_.first_position - 1 : next++);
    blocks += blocks_for(rows);
  }
  resize(static_cast<std::int64_t>(tokens_.size()), blocks);
  const std::int32_t* table = block_table_.data();
  for (auto& span : spans_) {
    span.blocks = table;
    table += blocks_for(span.rows);
  }
}

void Encoder::resize(std::int64_t tokens, std::int64_t blocks) {
  if (!keys_ || blocks > keys_->blocks()) {
    keys_.reset();
    keys_ = std::make_unique<KvCache>(1, blocks, KvType::f32, config_.heads, config_.head_size());
    block_table_.resize(static_cast<std::size_t>(blocks));
    std::iota(block_table_.begin(), block_table_.end(), 0);
  }
  if (tokens <= capacity_) return;
  const auto width = [&](std::int64_t n) { return static_cast<std::size_t>(tokens * n); };
  x_.resize(width(config_.hidden));
  qkv_.resize(width(3 * config_.hidden));
  attended_.resize(width(config_.hidden));
  inner_.resize(width(config_.intermediate));
  capacity_ = tokens;  // last: what was thrown for want of memory is tried again
}

void Encoder::embed() {
  const auto width = config_.hidden;
  workers_.parallel_for(static_cast<std::int64_t>(tokens_.size()), 16, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      float* row = x_.data() + t * width;
      expand_row(weights_.words, tokens_[static_cast<std::size_t>(t)], row);
      const float* place = weights_.places.data() + places_[static_cast<std::size_t>(t)] * width;
      for (std::int64_t i = 0; i < width; ++i) row[i] += place[i];
    }
  });
  normalise(weights_.embedding_norm);
}

void Encoder::normalise(const NormWeights& norm) {
  const auto width = config_.hidden;
  layer_norm(x_.data(), width, norm.weight.data(), norm.bias.empty() ? nullptr : norm.bias.data(), config_.norm_eps, x_.data(), width,
             static_cast<std::int64_t>(tokens_.size()), width, workers_);
}

void Encoder::attend(const EncoderLayer& layer) {
  const auto tokens = static_cast<std::int64_t>(tokens_.size()), width = config_.hidden, stride = 3 * width;
  in_.assign(x_.data(), tokens, width, width, layer.qkv.matrix.type(), workers_);
  multiply(layer.qkv.matrix, in_, qkv_.data(), stride, {layer.qkv.bias_data(), false}, workers_);
  const KvLayer& keys = keys_->layer(0);
  kv_store(keys, spans_, qkv_.data() + width, qkv_.data() + 2 * width, stride, workers_);
  AttentionOptions options{1 / std::sqrt(static_cast<float>(config_.head_size()))};
  options.causal = false;
  attention(keys, spans_, qkv_.data(), stride, config_.heads, attended_.data(), width, options, workers_);
  in_.assign(attended_.data(), tokens, width, width, layer.attention_output.matrix.type(), workers_);
  multiply(layer.attention_output.matrix, in_, x_.data(), width, {layer.attention_output.bias_data(), true}, workers_);
  normalise(layer.attention_norm);
}

void Encoder::feed_forward(const EncoderLayer& layer) {
  const auto tokens = static_cast<std::int64_t>(tokens_.size()), width = config_.hidden, inner = config_.intermediate;
  in_.assign(x_.data(), tokens, width, width, layer.up.matrix.type(), workers_);
  multiply(layer.up.matrix, in_, inner_.data(), inner, {layer.up.bias_data(), false}, workers_);
  gelu(inner_.data(), tokens * inner, config_.activation == Gate::gelu_tanh, workers_);
  inner_in_.assign(inner_.data(), tokens, inner, inner, layer.down.matrix.type(), workers_);
  multiply(layer.down.matrix, inner_in_, x_.data(), width, {layer.down.bias_data(), true}, workers_);
  normalise(layer.output_norm);
}

const float* Encoder::forward(std::span<const std::span<const Token>> texts) {
  place(texts);
  embed();
  for (const auto& layer : weights_.layers) {
    attend(layer);
    feed_forward(layer);
  }
  return x_.data();
}

}  // namespace unshard::inference
