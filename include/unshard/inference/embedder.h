#pragma once
// Texts to vectors, by an encoder of the BERT family: what search and clustering compare. Tokens in; the tokenizer is the caller's.
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "unshard/inference/engine.h"

namespace unshard::inference {

struct EmbedderOptions {
  std::string dtype = "auto";     ///< fp32, bf16, fp16; int8, int4 (weight only, in groups), w8a8; auto: as the file has it
  std::int64_t threads = 0;       ///< workers that compute; 0: the processor's cores
  std::int64_t batch_tokens = 0;  ///< tokens computed at once, which bounds memory (each text counts in whole 16s); 0: 256 a thread
  std::int64_t max_context = 0;   ///< tokens of a text at most, up to the model's positions; 0: as the model's folder says
  /// \throws std::invalid_argument naming the option, its value and what is accepted.
  void validate() const;
};

struct EmbedderInfo {
  std::string family;       ///< of config.json's model_type
  std::string dtype;        ///< of the matrices, as resolved
  std::string pooling;      ///< mean, cls, max: how a text's rows become one
  bool normalised = false;  ///< vectors have length 1
  std::int64_t vocab = 0, layers = 0, hidden = 0, context = 0, parameters = 0, weight_bytes = 0;
  /// First parts of a vector that are vectors themselves (Matryoshka), where config.json names them.
  std::vector<std::int64_t> shorter;
};

/// Source of pooling and normalisation: the files that sentence-transformers writes beside a model (modules.json, 1_Pooling/config.json,
/// sentence_bert_config.json); a folder without them gets the mean, not normalised, as there.
class Embedder {
 public:
  /// \param path  a Hugging Face folder (config.json, *.safetensors) of a BERT, RoBERTa, XLM-RoBERTa, CamemBERT or DistilBERT model
  /// \throws ModelError (another family: it says which are built), std::invalid_argument
  explicit Embedder(const std::string& path, const EmbedderOptions& options = {});
  ~Embedder();
  Embedder(const Embedder&) = delete;
  Embedder& operator=(const Embedder&) = delete;

  /// Does config.json at `path` name a family that Embedder takes? False for all else, also where there is none.
  static bool takes(const std::string& path);

  const EmbedderInfo& model() const;
  /// One vector a text: [texts, hidden], row after row. Tokens are those that the model's tokenizer gives, special ones included.
  /// A text's vector has the same bits whatever texts come with it, and with any number of threads.
  /// Any thread may call, but none of a forked child; calls are computed one after another.
  /// \throws std::invalid_argument  an empty or too long text, a token outside the vocabulary; names the text; nothing was computed
  /// Cost: memory of about batch_tokens * (9 * hidden + intermediate) floats, kept; one pass over the weights a batch.
  std::vector<float> embed(std::span<const std::vector<Token>> texts);
  /// The last layer's rows of one text, [tokens, hidden], before pooling. Throws as embed().
  std::vector<float> hidden_states(std::span<const Token> text);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace unshard::inference
