// What a request and an engine may ask for.
#include <algorithm>
#include <cmath>

#include "unshard/core/error.h"
#include "unshard/inference/engine.h"

namespace unshard::inference {
namespace {

/// Every check is written so that NaN fails it.
template <class Value>
void check(bool ok, const char* where, const char* name, const Value& value, const char* accepted) {
  require(ok, "[inference.", where, "] ", name, " is ", value, "; accepted: ", accepted);
}

void check_token(Token token, std::int64_t vocab, const char* name) {
  require(token >= 0 && token < vocab, "[inference.request] ", name, " names token ", token, "; the vocabulary has tokens 0 to ",
          vocab - 1);
}

/// "aten:cpu" computes on LibTorch's CPU tensors what "cuda" computes on the GPU's: for tests.
bool is_device(const std::string& device) {
  if (device == "cpu" || device == "cuda" || device == "aten:cpu") return true;
  const auto number = device.starts_with("cuda:") ? device.substr(5) : "";
  return !number.empty() && number.size() <= 3 && std::ranges::all_of(number, [](char c) { return c >= '0' && c <= '9'; });
}

void check_sampling(const SamplingOptions& s, std::int64_t vocab) {
  const auto request = [](bool ok, const char* name, auto value, const char* accepted) { check(ok, "request", name, value, accepted); };
  request(s.temperature >= 0 && std::isfinite(s.temperature), "temperature", s.temperature, "0 (greedy) and above, finite");
  request(s.top_p > 0 && s.top_p <= 1, "top_p", s.top_p, "above 0, up to 1");
  request(s.top_k >= 0, "top_k", s.top_k, "0 (all) and above");
  request(s.min_p >= 0 && s.min_p < 1, "min_p", s.min_p, "0 to below 1");
  request(s.repetition_penalty >= 0.01 && s.repetition_penalty <= 100, "repetition_penalty", s.repetition_penalty, "0.01 to 100");
  request(s.presence_penalty >= -2 && s.presence_penalty <= 2, "presence_penalty", s.presence_penalty, "-2 to 2");
  request(s.frequency_penalty >= -2 && s.frequency_penalty <= 2, "frequency_penalty", s.frequency_penalty, "-2 to 2");
  require(s.logprobs >= -1 && s.logprobs <= vocab, "[inference.request] logprobs is ", s.logprobs, "; accepted: -1 (none) to ", vocab,
          ", the vocabulary");
  for (const auto& [token, bias] : s.logit_bias) {
    check_token(token, vocab, "logit_bias");
    require(std::isfinite(bias), "[inference.request] logit_bias of token ", token, " is ", bias, "; accepted: finite numbers");
  }
}

}  // namespace

void RequestOptions::validate(std::int64_t vocab) const {
  check_sampling(sampling, vocab);
  check(max_tokens >= 1 || max_tokens == -1, "request", "max_tokens", max_tokens, "1 and above, or -1 (as many as the context holds)");
  check(min_tokens >= 0, "request", "min_tokens", min_tokens, "0 and above");
  require(max_tokens == -1 || min_tokens <= max_tokens, "[inference.request] min_tokens is ", min_tokens, ", above max_tokens ", max_tokens,
          "; lower the one or raise the other");
  check(n >= 1, "request", "n", n, "1 and above");
  for (const Token token : stop_tokens) check_token(token, vocab, "stop_tokens");
  require(filters.empty() || static_cast<std::int64_t>(filters.size()) == n, "[inference.request] ", filters.size(),
          " filters came for n = ", n, " sequences; give none, or one for each");
  require(std::ranges::all_of(filters, [](const auto& filter) { return filter != nullptr; }),
          "[inference.request] a filter is null; give none, or one for each sequence");
}

void EngineOptions::validate() const {
  const auto one_of = [](const char* name, const std::string& value, std::initializer_list<const char*> names, const char* accepted) {
    check(std::ranges::any_of(names, [&](const char* each) { return value == each; }), "engine", name, "\"" + value + "\"", accepted);
  };
  check(is_device(device), "engine", "device", "\"" + device + "\"", "cpu, cuda, cuda:N");
  one_of("dtype", dtype, {"auto", "fp32", "bf16", "fp16", "int8", "int4", "w8a8"}, "auto, fp32, bf16, fp16, int8, int4, w8a8");
  one_of("kv_dtype", kv_dtype, {"auto", "fp32", "bf16", "int8"}, "auto, fp32, bf16, int8");
  const auto from = [](const char* name, std::int64_t value, std::int64_t least, std::int64_t most, const char* accepted) {
    check(value >= least && value <= most, "engine", name, value, accepted);
  };
  constexpr std::int64_t kMany = std::int64_t{1} << 30;  // products of two of these fit in 64 bits
  from("threads", threads, 0, 4096, "0 (the processor's cores) to 4096");
  from("kv_cache_tokens", kv_cache_tokens, 0, kMany, "0 (as many as fit in kv_cache_bytes) to 2^30");
  if (kv_cache_tokens == 0) from("kv_cache_bytes", kv_cache_bytes, 1, std::int64_t{1} << 46, "1 to 2^46 where kv_cache_tokens is 0");
  from("step_tokens", step_tokens, 0, kMany, "0 (40 a thread) to 2^30");
  from("max_sequences", max_sequences, 1, kMany, "1 to 2^30");
  from("max_waiting", max_waiting, 1, kMany, "1 to 2^30");
  from("max_context", max_context, 0, kMany, "0 (the model's own) to 2^30");
  from("guesses", guesses, 1, 64, "1 to 64");
  require(!always_guess || !speculate.empty(), "[inference.engine] always_guess is set and speculate isn't: nobody guesses; say who does");
  from("weight_memory_bytes", weight_memory_bytes, 0, std::int64_t{1} << 46, "0 (all weights in memory) to 2^46");
}

const char* finish_name(Finish finish) {
  switch (finish) {
    case Finish::none:
      return "";
    case Finish::stop:
      return "stop";
    case Finish::length:
      return "length";
    case Finish::cancelled:
      return "cancelled";
    case Finish::error:
      return "error";
  }
  return "";
}

}  // namespace unshard::inference
