#include "unshard/inference/embedder.h"

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <mutex>

#include "inference/encoder/encoder.h"
#include "inference/encoder/pooling.h"
#include "inference/model/settings_file.h"
#include "inference/weights/memory_need.h"

namespace unshard::inference {
namespace {

/// What a text takes of a batch: keys lie in whole blocks.
std::int64_t cost_of(std::span<const Token> text) {
  return (static_cast<std::int64_t>(text.size()) + kBlockTokens - 1) / kBlockTokens * kBlockTokens;
}

void check_memory(const WeightSource& source, const std::string& dtype) {
  const auto need = packed_bytes(source, dtype), free = available_bytes();
  if (free >= 0 && need > free)
    throw ModelError(cat(source.path(), ": its weights take about ", need >> 20, " MB as ", dtype, ", and ", free >> 20,
                         " MB of memory are free; ask for a smaller dtype (int8, int4)"));
}

Settings config_of(const std::filesystem::path& path) {
  std::error_code error;
  if (!std::filesystem::exists(path, error)) throw ModelError(cat(path.string(), ": there is no such folder"));
  if (!std::filesystem::exists(path / "config.json", error))
    throw ModelError(cat(path.string(), ": has no config.json; embeddings want a Hugging Face folder"));
  return read_settings(path / "config.json");
}

}  // namespace

struct Embedder::Impl {
  EmbedderOptions options;
  Workers workers;
  SentenceSettings sentence;
  std::unique_ptr<Encoder> encoder;
  EmbedderInfo info;
  std::mutex mutex;  ///< one call at a time computes
  const pid_t process = getpid();

  Impl(const std::string& path, const EmbedderOptions& asked) : options(asked), workers(asked.threads) {
    // Products are bound by arithmetic from far fewer rows on; more only push a batch's rows out of the second-level cache.
    if (options.batch_tokens == 0) options.batch_tokens = 256 * workers.count();
    const auto settings = config_of(path);
    const auto config = encoder_config(settings);
    sentence = sentence_settings(path, settings);
    set_context(config);
    auto source = open_weights(path);
    check_memory(*source, options.dtype);
    encoder = std::make_unique<Encoder>(std::move(source), config, options.dtype, workers);
    describe();
  }

  void set_context(const EncoderConfig& config) {
    require(options.max_context <= config.context(), "[inference.embedder] max_context ", options.max_context, " is beyond the model's ",
            config.context(), " positions");
    info.context = sentence.most_tokens > 0 ? std::min(sentence.most_tokens, config.context()) : config.context();
    if (options.max_context > 0) info.context = options.max_context;
  }

  void describe() {
    const auto& config = encoder->config();
    const auto& weights = encoder->weights();
    info.family = config.family;
    info.dtype = options.dtype == "auto" ? weight_type_name(weights.layers.front().qkv.matrix.type()) : options.dtype;
    info.pooling = pooling_name(sentence.pooling);
    info.normalised = sentence.normalise;
    info.shorter = sentence.shorter;
    info.vocab = config.vocab;
    info.layers = config.layers;
    info.hidden = config.hidden;
    info.parameters = weights.parameters;
    info.weight_bytes = weights.bytes;
  }

  void check_process() const {
    if (process != getpid())
      throw std::runtime_error(
          "[inference.embed] this process was forked from the one that opened the model, whose threads it hasn't; open another");
  }

  void check(std::span<const Token> text, std::size_t number) const {
    require(!text.empty(), "[inference.embed] text ", number, " is empty");
    require(static_cast<std::int64_t>(text.size()) <= info.context, "[inference.embed] text ", number, " has ", text.size(),
            " tokens; the model takes ", info.context);
    for (std::size_t i = 0; i < text.size(); ++i)
      require(text[i] >= 0 && text[i] < info.vocab, "[inference.embed] token ", text[i], " at position ", i, " of text ", number,
              " isn't in the vocabulary of ", info.vocab);
  }

  /// As many texts from the front as a batch holds, at least one: their vectors to `out`. \return how many
  std::size_t embed_some(std::span<const std::vector<Token>> texts, float* out) {
    std::vector<std::span<const Token>> batch;
    for (std::int64_t left = options.batch_tokens; batch.size() < texts.size(); batch.push_back(texts[batch.size()])) {
      left -= cost_of(texts[batch.size()]);
      if (left < 0 && !batch.empty()) break;
    }
    const float* rows = encoder->forward(batch);
    std::vector<std::int64_t> firsts(batch.size());
    for (std::size_t i = 1; i < batch.size(); ++i) firsts[i] = firsts[i - 1] + static_cast<std::int64_t>(batch[i - 1].size());
    workers.parallel_for(static_cast<std::int64_t>(batch.size()), 4, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i)
        pool(rows + firsts[static_cast<std::size_t>(i)] * info.hidden, static_cast<std::int64_t>(batch[static_cast<std::size_t>(i)].size()),
             info.hidden, sentence.pooling, sentence.normalise, out + i * info.hidden);
    });
    return batch.size();
  }
};

Embedder::Embedder(const std::string& path, const EmbedderOptions& options) {
  options.validate();
  impl_ = std::make_unique<Impl>(path, options);
}

Embedder::~Embedder() {
  if (impl_ && impl_->process != getpid()) (void)impl_.release();  // a forked child has none of the threads that would have to be joined
}

bool Embedder::takes(const std::string& path) {
  try {
    return is_encoder_family(config_of(path).get<std::string>("model_type"));
  } catch (const ModelError&) {  // who opens it says what is wrong
    return false;
  }
}

const EmbedderInfo& Embedder::model() const { return impl_->info; }

std::vector<float> Embedder::embed(std::span<const std::vector<Token>> texts) {
  impl_->check_process();
  for (std::size_t i = 0; i < texts.size(); ++i) impl_->check(texts[i], i);
  const auto hidden = static_cast<std::size_t>(impl_->info.hidden);
  std::vector<float> vectors(texts.size() * hidden);
  const std::lock_guard lock(impl_->mutex);
  for (std::size_t done = 0; done < texts.size();) done += impl_->embed_some(texts.subspan(done), vectors.data() + done * hidden);
  return vectors;
}

std::vector<float> Embedder::hidden_states(std::span<const Token> text) {
  impl_->check_process();
  impl_->check(text, 0);
  const std::lock_guard lock(impl_->mutex);
  const float* rows = impl_->encoder->forward(std::span(&text, 1));
  return {rows, rows + static_cast<std::int64_t>(text.size()) * impl_->info.hidden};
}

void EmbedderOptions::validate() const {
  EngineOptions shared;  // what has the same name means the same, and is checked in one place
  shared.dtype = dtype;
  shared.threads = threads;
  shared.step_tokens = batch_tokens;
  shared.max_context = max_context;
  require(batch_tokens >= 0 && batch_tokens <= std::int64_t{1} << 24, "[inference.embedder] batch_tokens is ", batch_tokens,
          "; accepted: 0 (256 a thread) to 2^24");
  shared.validate();
}

}  // namespace unshard::inference
