#include "inference/runner.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "inference/model/cpu_model.h"
#include "inference/weights/memory_need.h"
#include "unshard/core/error.h"

namespace unshard::inference {
namespace {

/// `budget`: of the weights, 0: none. `table_bytes`: of cos and sin of every position, which a config can say to be millions.
void check_memory(const WeightSource& source, const std::string& dtype, std::int64_t budget, int ranks, double table_bytes) {
  const auto all = packed_bytes(source, dtype) / ranks, weights = budget > 0 ? std::min(all, budget) : all, free = available_bytes();
  constexpr double kMega = 1 << 20;
  if (free >= 0 && static_cast<double>(weights) + table_bytes > static_cast<double>(free))
    throw ModelError(cat(source.path(), ": its weights take about ", weights >> 20, " MB as ", dtype, ", its positions ",
                         static_cast<std::int64_t>(table_bytes / kMega), " MB, and ", free >> 20,
                         " MB of memory are free; ask for a smaller dtype (int8, int4) or max_context, or let part of the weights be read "
                         "from disk in each step (--weight-memory 2G)"));
}

double table_bytes(const ModelConfig& config, std::int64_t context) {
  return static_cast<double>(context) * static_cast<double>(config.rope.rotary + config.local_rope.rotary) * sizeof(float);
}

std::int64_t blocks_for(std::int64_t tokens) { return (tokens + kBlockTokens - 1) / kBlockTokens; }

// ---- a batch as words, for the other ranks ----
void put(std::vector<std::int32_t>& words, std::int64_t value) { words.push_back(static_cast<std::int32_t>(value)); }

std::vector<std::int32_t> words_of(std::int32_t order, const Runner::Copies& copies, const Batch& batch) {
  std::vector<std::int32_t> words{order};
  put(words, static_cast<std::int64_t>(copies.size()));
  for (const auto& [from, to] : copies) words.insert(words.end(), {from, to});
  put(words, static_cast<std::int64_t>(batch.spans.size()));
  for (const auto& span : batch.spans) {
    const auto blocks = blocks_for(span.position + span.rows);
    put(words, span.rows), put(words, span.position), put(words, blocks);
    words.insert(words.end(), span.blocks, span.blocks + blocks);
    words.insert(words.end(), batch.tokens.begin() + span.first_row, batch.tokens.begin() + span.first_row + span.rows);
  }
  put(words, static_cast<std::int64_t>(batch.logit_rows.size()));
  for (const auto row : batch.logit_rows) put(words, row);
  return words;
}

struct Received {
  Runner::Copies copies;
  Batch batch;
};

/// Block tables stay where they are in `words`.
Received read_words(const std::vector<std::int32_t>& words) {
  Received out;
  std::size_t at = 1;
  const auto next = [&] { return words.at(at++); };
  for (auto left = next(); left > 0; --left) {
    const auto from = next();
    out.copies.emplace_back(from, next());
  }
  for (auto left = next(); left > 0; --left) {
    const auto rows = next(), position = next(), blocks = next();
    const std::int32_t* table = words.data() + at;
    at += static_cast<std::size_t>(blocks);
    out.batch.add({words.data() + at, static_cast<std::size_t>(rows)}, position, table);
    at += static_cast<std::size_t>(rows);
  }
  for (auto left = next(); left > 0; --left) out.batch.logit_rows.push_back(next());
  return out;
}

}  // namespace

Runner::Runner(OpenedModel model, const EngineOptions& options, Workers& workers, std::shared_ptr<Peers> peers,
               const ModelFactory& other_devices)
    : options_(options), workers_(workers), peers_(std::move(peers)) {
  context_ = options_.max_context > 0 ? options_.max_context : model.config.context;
  require(context_ <= model.config.context || !model.config.learned_positions, "[inference.engine] max_context ", context_,
          " is beyond the model's ", model.config.context, " learned positions");
  make_model(std::move(model), other_devices);
  make_cache();
  describe();
}

void Runner::make_model(OpenedModel model, const ModelFactory& other_devices) {
  if (options_.device != "cpu") {
    require(other_devices != nullptr, "[inference.engine] device is \"", options_.device,
            "\", and this engine computes on \"cpu\" alone; give it torch_models() (unshard/inference/torch_models.h)");
    require(peers_ == nullptr, "[inference.engine] several ranks (tensor parallelism) compute on device \"cpu\" alone, and device is \"",
            options_.device, "\"");
    require(options_.weight_memory_bytes == 0,
            "[inference.engine] weight_memory_bytes (weights read from disk in each step) is for device "
            "\"cpu\" alone, and device is \"",
            options_.device, "\"; leave one of them out");
    model_ = other_devices(std::move(model), options_, context_);
    return;
  }
  check_memory(*model.weights, options_.dtype, options_.weight_memory_bytes, peers_ ? peers_->size() : 1,
               table_bytes(model.config, context_));
  model_ = std::make_unique<CpuModel>(std::move(model.weights), std::move(model.config), options_.dtype, options_.kv_dtype, context_,
                                      workers_, peers_, MemoryBudget{options_.weight_memory_bytes, options_.weight_cache});
}

Runner::~Runner() = default;

void Runner::make_cache() {
  const auto per_block = model_->facts().block_bytes;
  auto blocks = options_.kv_cache_tokens > 0 ? blocks_for(options_.kv_cache_tokens) : options_.kv_cache_bytes / per_block;
  blocks = std::min({blocks, options_.max_sequences * blocks_for(context_), std::int64_t{std::numeric_limits<std::int32_t>::max()}});
  require(blocks > 0, "[inference.engine] kv_cache_bytes ", options_.kv_cache_bytes, " hold not one block of ", per_block, " bytes");
  cache_ = model_->new_cache(blocks);
}

void Runner::describe() {
  const auto& config = model_->config();
  const auto facts = model_->facts();
  info_.family = config.family;
  info_.dtype = facts.dtype;
  info_.kv_dtype = facts.kv_dtype;
  info_.vocab = config.vocab;
  info_.layers = config.layers;
  info_.context = context_;
  info_.parameters = facts.parameters;
  info_.weight_bytes = facts.weight_bytes;
  info_.kv_bytes = cache_->bytes();
  if (model_->stream()) info_.weights_from_disk = model_->stream()->describe();
  info_.end_tokens = config.end_tokens;
  info_.unread = facts.unread;
}

void Runner::tell(Order order, const Copies& copies, const Batch& batch) {
  if (!peers_) return;
  auto words = words_of(static_cast<std::int32_t>(order), copies, batch);
  peers_->broadcast(words);
}

void Runner::step(const Copies& copies, const Batch& batch, std::vector<float>& logits) {
  tell(Order::step, copies, batch);
  cache_->copy(copies);
  model_->forward(batch, *cache_, logits);
}

std::vector<float> Runner::logits_alone(std::span<const Token> tokens) {
  const auto own = model_->new_cache(blocks_for(static_cast<std::int64_t>(tokens.size())));
  try {
    return logits_in(*own, tokens);
  } catch (...) {  // the others are in the middle of it: no next order would meet them where this rank is
    fail();
    throw;
  }
}

std::vector<float> Runner::logits_in(StepCache& own, std::span<const Token> tokens) {
  const auto count = static_cast<std::int64_t>(tokens.size());
  tell(Order::open, {{static_cast<std::int32_t>(own.blocks()), 0}}, {});
  std::vector<std::int32_t> blocks(static_cast<std::size_t>(own.blocks()));
  std::iota(blocks.begin(), blocks.end(), 0);
  std::vector<float> all, some;
  for (std::int64_t first = 0; first < count; first += options_.step_tokens) {
    const auto rows = std::min(options_.step_tokens, count - first);
    Batch batch;
    batch.add(tokens.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(rows)), first, blocks.data());
    for (std::int64_t i = 0; i < rows; ++i) batch.logit_rows.push_back(i);
    tell(Order::alone, {}, batch);
    model_->forward(batch, own, some);
    all.insert(all.end(), some.begin(), some.end());
  }
  tell(Order::close, {}, {});
  return all;
}

void Runner::follow() {
  try {
    obey();
  } catch (...) {  // the others would wait for this rank
    fail();
    throw;
  }
}

void Runner::obey() {
  std::unique_ptr<StepCache> own;
  std::vector<float> logits;
  for (std::vector<std::int32_t> words;;) {
    peers_->broadcast(words);
    const auto order = static_cast<Order>(words.at(0));
    if (order == Order::end) return;
    const auto got = read_words(words);
    if (order == Order::open) own = model_->new_cache(got.copies.front().first);
    if (order == Order::close) own.reset();
    if (order == Order::step) cache_->copy(got.copies);
    if (order == Order::step || order == Order::alone) model_->forward(got.batch, order == Order::step ? *cache_ : *own, logits);
  }
}

void Runner::fail() noexcept {
  if (peers_) peers_->fail(peers_->rank() == 0 ? "rank 0's engine ended with an error" : "a rank that follows ended with an error");
}

void Runner::end() {
  if (!std::exchange(ended_, true)) tell(Order::end, {}, {});
}

}  // namespace unshard::inference
