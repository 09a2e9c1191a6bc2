#include "unshard/inference/engine.h"

#include <unistd.h>

#include <algorithm>
#include <exception>

#include "inference/kernels/workers.h"
#include "inference/open_model.h"
#include "inference/runner.h"
#include "inference/serving_loop.h"
#include "unshard/core/error.h"

namespace unshard::inference {
namespace {
/// A GPU's matrices are bound by memory below some hundreds of rows.
constexpr std::int64_t kDeviceStepTokens = 2048;
}  // namespace

struct Engine::Impl {
  EngineOptions options;
  std::shared_ptr<Peers> peers;
  std::unique_ptr<Workers> workers;
  std::unique_ptr<Runner> runner;
  std::unique_ptr<Speculator> speculator;  // until the loop has it
  std::unique_ptr<ServingLoop> loop;
  const pid_t process = getpid();

  Impl(const std::string& path, const EngineOptions& asked, std::shared_ptr<Peers> given, const ModelFactory& other_devices)
      : options(asked), peers(std::move(given)) {
    options.validate();
    open(path, other_devices);
    if (!peers || peers->rank() == 0) loop = std::make_unique<ServingLoop>(*runner, options, *workers, std::move(speculator));
  }

  /// What fails on one rank (its memory, say) fails on all, so that none waits for the others.
  void open(const std::string& path, const ModelFactory& other_devices) {
    std::exception_ptr cause;
    try {
      workers = std::make_unique<Workers>(options.threads);
      // Enough for products to be bound by arithmetic, and few enough that a step with a prompt in it is little longer than one without.
      if (options.step_tokens == 0) options.step_tokens = options.device == "cpu" ? 40 * workers->count() : kDeviceStepTokens;
      runner = std::make_unique<Runner>(open_model(path), options, *workers, peers, other_devices);
      // Rank 0 alone decides on guesses, and a draft model is its own.
      if (!peers || peers->rank() == 0) speculator = make_speculator(options, *runner, *workers, other_devices);
    } catch (...) {
      cause = std::current_exception();
    }
    float failed = cause ? 1 : 0;
    try {
      if (peers) peers->all_reduce(&failed, 1);
    } catch (const std::exception&) {
      if (!cause) throw;
    }
    if (cause) std::rethrow_exception(cause);
    if (failed > 0) throw ModelError(cat(path, ": ", failed, " of ", peers->size(), " ranks can't open it; their own errors say why"));
  }

  ServingLoop& serving() const {
    if (process != getpid())
      throw std::runtime_error(
          "[inference] this process was forked from the one that opened the engine, whose threads it hasn't; open another");
    require(loop != nullptr, "[inference.engine] requests go to rank 0; this is rank ", peers ? peers->rank() : 0, ", which follows it");
    return *loop;
  }

  void check_prompt(std::span<const Token> prompt) const {
    const auto vocab = runner->info().vocab;
    require(!prompt.empty(), "[inference.submit] the prompt is empty");
    for (std::size_t i = 0; i < prompt.size(); ++i)
      require(prompt[i] >= 0 && prompt[i] < vocab, "[inference.submit] token ", prompt[i], " at position ", i,
              " isn't in the vocabulary of ", vocab);
  }
};

Engine::Engine(const std::string& path, const EngineOptions& options, const ModelFactory& other_devices)
    : impl_(std::make_unique<Impl>(path, options, nullptr, other_devices)) {}
Engine::Engine(const std::string& path, const EngineOptions& options, std::shared_ptr<Peers> peers, const ModelFactory& other_devices)
    : impl_(std::make_unique<Impl>(path, options, std::move(peers), other_devices)) {}
Engine::~Engine() {
  if (impl_->process != getpid()) (void)impl_.release();  // a forked child has none of the threads that would have to be joined
}

bool Engine::on_own_thread() const { return impl_->loop && impl_->loop->on_own_thread(); }

void Engine::follow() {
  require(impl_->peers && impl_->peers->rank() > 0, "[inference.follow] only ranks above 0 follow, and this is rank 0");
  impl_->runner->follow();
}

const ModelInfo& Engine::model() const { return impl_->runner->info(); }

std::int64_t Engine::submit(std::span<const Token> prompt, const RequestOptions& asked) {
  impl_->check_prompt(prompt);
  auto options = asked;
  const auto tokens = static_cast<std::int64_t>(prompt.size()), room = impl_->runner->info().context - tokens;
  const auto held = impl_->runner->kv_blocks() * kBlockTokens;
  require(room > 0, "[inference.submit] the prompt has ", tokens, " tokens and the context ", impl_->runner->info().context,
          ": nothing is left for an answer");
  require(tokens < held, "[inference.submit] the prompt has ", tokens, " tokens and the KV cache ", held,
          ": nothing is left for an answer");
  if (options.max_tokens == -1) options.max_tokens = std::min(room, held - tokens);
  options.validate(impl_->runner->info().vocab);
  require(options.n <= impl_->options.max_sequences, "[inference.submit] n ", options.n, " is beyond the ", impl_->options.max_sequences,
          " sequences that run at once (max_sequences)");
  require(options.max_tokens <= room, "[inference.submit] ", tokens, " tokens of prompt and max_tokens ", options.max_tokens,
          " are beyond the context of ", impl_->runner->info().context);
  require(tokens + options.max_tokens <= held, "[inference.submit] ", tokens, " tokens of prompt and max_tokens ", options.max_tokens,
          " are beyond the KV cache of ", held, " tokens");
  return impl_->serving().submit({prompt.begin(), prompt.end()}, std::move(options));
}

void Engine::cancel(std::int64_t request) { impl_->serving().cancel(request); }
std::vector<Output> Engine::poll(double timeout_s) { return impl_->serving().poll(timeout_s); }
void Engine::end_polls() {
  if (impl_->loop) impl_->loop->end_polls();
}
EngineStats Engine::stats() const { return impl_->serving().stats(); }

std::vector<float> Engine::logits(std::span<const Token> tokens) {
  impl_->check_prompt(tokens);
  require(static_cast<std::int64_t>(tokens.size()) <= impl_->runner->info().context, "[inference.logits] ", tokens.size(),
          " tokens are beyond the context of ", impl_->runner->info().context);
  std::vector<float> result;
  impl_->serving().run([&] { result = impl_->runner->logits_alone(tokens); });
  return result;
}

}  // namespace unshard::inference
