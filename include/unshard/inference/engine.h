#pragma once
// Serve a trained model to many users at once: continuous batching over a paged KV cache, on one thread of its own.
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "unshard/inference/sampling.h"

namespace unshard {
class Communicator;
}

namespace unshard::inference {
class Peers;

/// A model can't be used: a damaged, foreign or unsupported file, a missing tensor, too little memory. Names file, tensor and reason.
struct ModelError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// The queue is full; try again after `retry_after_s`.
struct Overloaded : std::runtime_error {
  Overloaded(const std::string& what, double retry_after_s) : std::runtime_error(what), retry_after_s(retry_after_s) {}
  double retry_after_s;
};

struct EngineOptions {
  std::string device = "cpu";        ///< our kernels; cuda, cuda:N: LibTorch on that GPU (see ModelFactory)
  std::string dtype = "auto";        ///< fp32, bf16, fp16; int8, int4 (weight only, in groups), w8a8; auto: as the file has it
  std::string kv_dtype = "auto";     ///< fp32, bf16, int8; auto: bf16, or fp32 where dtype is fp32
  std::int64_t threads = 0;          ///< workers that compute; 0: the processor's cores
  std::int64_t kv_cache_tokens = 0;  ///< tokens that the KV cache holds; 0: as many as fit in kv_cache_bytes
  std::int64_t kv_cache_bytes = std::int64_t{1} << 30;  ///< used where kv_cache_tokens is 0
  std::int64_t step_tokens = 0;      ///< tokens that one step computes at most (Dynamic SplitFuse's budget); 0: 40 a thread
  std::int64_t max_sequences = 256;  ///< that run at once
  std::int64_t max_waiting = 1024;   ///< requests that may wait; more are refused with Overloaded
  std::int64_t max_context = 0;      ///< tokens of prompt and output together; 0: the model's own
  bool share_prefixes = true;        ///< equal beginnings of prompts use the same blocks
  /// Speculative decoding: who guesses next tokens, which one step then checks together. The output stays what it is, bit for bit.
  /// "": nobody; "ngram": what followed the last tokens earlier in prompt or output; else the path of a smaller model of the same
  /// vocabulary.
  std::string speculate = "";
  std::int64_t guesses = 8;   ///< of a sequence in a step, at most; fewer, or none, where more wouldn't pay
  bool always_guess = false;  ///< as many as there are, whether they pay or not
  /// Of layers and output matrix, on each rank. Where they take more, some stay and the others are read from disk in each step, ahead of
  /// their use, from a file that they are packed into once. 0: all in memory.
  std::int64_t weight_memory_bytes = 0;
  std::string weight_cache = {};  ///< folder of those files; "": .unshard beside the model
  void validate() const;
};

struct OpenedModel;
class StepModel;
/// Makes what computes on devices but "cpu" (with this many tokens of context at most): torch_models() of
/// unshard/inference/torch_models.h. The engine itself needs no torch.
using ModelFactory = std::function<std::unique_ptr<StepModel>(OpenedModel model, const EngineOptions& options, std::int64_t context)>;

enum class Finish { none, stop, length, cancelled, error };
const char* finish_name(Finish finish);  ///< "", "stop", "length", "cancelled", "error"

struct TokenLogprob {
  Token token;
  float logprob;
};

/// One generated token of one sequence, or the end of it.
struct Output {
  std::int64_t request = 0;
  std::int64_t index = 0;               ///< which of the request's n sequences
  Token token = -1;                     ///< -1: no token comes with this end
  float logprob = 0;                    ///< of `token`, where asked for
  std::vector<TokenLogprob> likeliest;  ///< where asked for, best first
  Finish finish = Finish::none;
  std::string error;  ///< for Finish::error
};

struct EngineStats {
  std::int64_t waiting = 0, running = 0, blocks = 0, blocks_used = 0, block_tokens = 0;
  std::int64_t steps = 0, prompt_tokens = 0, generated_tokens = 0, shared_tokens = 0, preemptions = 0;
  std::int64_t finished = 0, cancelled = 0, refused = 0;
  std::int64_t guessed = 0, accepted = 0;  ///< guesses computed, and those of them that were right
  double busy_s = 0;                       ///< time in steps since the start
  std::int64_t weight_bytes_read = 0;      ///< from disk in steps, of rank 0
  double weight_wait_s = 0;                ///< of busy_s: waiting for them
};

struct ModelInfo {
  std::string family;           ///< of config.json's model_type, or GGUF's general.architecture
  std::string dtype, kv_dtype;  ///< as resolved
  std::int64_t vocab = 0, layers = 0, context = 0, parameters = 0, weight_bytes = 0, kv_bytes = 0;
  std::vector<Token> end_tokens;
  std::string weights_from_disk;    ///< which are read in each step, and how; "": none
  std::vector<std::string> unread;  ///< tensors of the file that look like weights of a layer, and that nothing has read
};

class Engine {
 public:
  /// \param path  a Hugging Face folder (config.json, *.safetensors) or a GGUF file
  /// \param other_devices  for options.device but "cpu": torch_models()
  /// \throws ModelError, std::invalid_argument
  Engine(const std::string& path, const EngineOptions& options = {}, const ModelFactory& other_devices = {});
  /// Tensor parallelism: every rank of `comm` makes an engine of the same model and options and holds a part of each matrix and of the KV
  /// cache. Requests go to rank 0; the others call follow(). At most as many ranks as the model has key-value heads.
  /// comm: null is one rank. Other devices but "cpu" are one rank's alone.
  Engine(const std::string& path, const EngineOptions& options, std::shared_ptr<Communicator> comm, const ModelFactory& other_devices = {});
  /// The same over what `comm` becomes, for who can't have torch (inference/comm_peers.h makes it); null: one rank.
  Engine(const std::string& path, const EngineOptions& options, std::shared_ptr<Peers> peers, const ModelFactory& other_devices = {});
  ~Engine();  ///< what still runs is cancelled
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  const ModelInfo& model() const;
  /// Queue a request. Any thread. \return its number, from 1 up.
  /// \throws std::invalid_argument  an empty or too long prompt, a token outside the vocabulary, a wrong option
  /// \throws Overloaded             max_waiting requests wait already
  std::int64_t submit(std::span<const Token> prompt, const RequestOptions& options);
  /// End a request wherever it is; its blocks are free when the current step ends. One Output of Finish::cancelled a sequence still
  /// running.
  void cancel(std::int64_t request);
  /// Outputs since the last call, in order; waits up to `timeout_s` for the first. Any thread. \throws what ended the engine's thread.
  std::vector<Output> poll(double timeout_s);
  /// Polls wait no longer, those under way included: so that who is about to close the engine needn't wait for who polls it.
  void end_polls();
  EngineStats stats() const;
  /// Is the caller a TokenFilter, on the engine's thread? The engine can't be destroyed from there.
  bool on_own_thread() const;
  /// On ranks above 0: compute with rank 0 until its engine ends. \throws CommError rank 0 is gone
  void follow();
  /// Logits of every position of one prompt, computed alone and at once, without the cache: [tokens, vocab]. For tests and perplexity.
  std::vector<float> logits(std::span<const Token> tokens);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace unshard::inference
