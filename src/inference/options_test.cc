// Facts about options: defaults are right, and each wrong value is named.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "unshard/inference/engine.h"

namespace unshard::inference {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

template <class Options, class... Args>
std::string error_of(const std::function<void(Options&)>& change, Args... args) {
  Options options;
  change(options);
  try {
    options.validate(args...);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "accepted";
}
std::string request_error(const std::function<void(RequestOptions&)>& change) {
  return error_of<RequestOptions>(change, std::int64_t{100});
}
std::string engine_error(const std::function<void(EngineOptions&)>& change) { return error_of<EngineOptions>(change); }

struct NoFilter : TokenFilter {
  void restrict(std::span<const Token>, std::span<std::uint32_t>) override {}
};

TEST(RequestOptions, DefaultsAndTheEndsOfEveryRangeAreAccepted) {
  EXPECT_EQ(request_error([](auto&) {}), "accepted");
  EXPECT_EQ(request_error([](auto& o) {
              o.sampling.temperature = 0;
              o.sampling.top_p = 1e-9;
              o.sampling.top_k = 1'000'000;
              o.sampling.presence_penalty = -2;
              o.sampling.frequency_penalty = 2;
              o.sampling.logprobs = 100;
              o.sampling.logit_bias = {{0, -100.0F}, {99, 100.0F}};
              o.stop_tokens = {0, 99};
              o.max_tokens = -1;
              o.min_tokens = 1000;
              o.n = 2;
              o.filters = {std::make_shared<NoFilter>(), std::make_shared<NoFilter>()};
            }),
            "accepted");
}

TEST(RequestOptions, EachWrongValueIsNamed) {
  const double nan = std::nan(""), infinity = std::numeric_limits<double>::infinity();
  for (const double wrong : {-0.1, nan, infinity}) {
    EXPECT_THAT(request_error([&](auto& o) { o.sampling.temperature = wrong; }),
                AllOf(HasSubstr("[inference.request] temperature"), HasSubstr("0 (greedy)")));
  }
  for (const double wrong : {0.0, 1.01, nan}) EXPECT_THAT(request_error([&](auto& o) { o.sampling.top_p = wrong; }), HasSubstr("top_p is"));
  for (const double wrong : {-0.1, 1.0, nan}) EXPECT_THAT(request_error([&](auto& o) { o.sampling.min_p = wrong; }), HasSubstr("min_p is"));
  for (const double wrong : {0.0, -1.0, 1e-300, 1e300, nan, infinity}) {
    EXPECT_THAT(request_error([&](auto& o) { o.sampling.repetition_penalty = wrong; }), HasSubstr("repetition_penalty is"));
  }
  for (const double wrong : {-2.1, 2.1, nan}) {
    EXPECT_THAT(request_error([&](auto& o) { o.sampling.presence_penalty = wrong; }), HasSubstr("presence_penalty is"));
    EXPECT_THAT(request_error([&](auto& o) { o.sampling.frequency_penalty = wrong; }), HasSubstr("frequency_penalty is"));
  }
  EXPECT_THAT(request_error([](auto& o) { o.sampling.top_k = -1; }), HasSubstr("top_k is -1"));
  for (const int wrong : {-2, 101}) EXPECT_THAT(request_error([&](auto& o) { o.sampling.logprobs = wrong; }), HasSubstr("logprobs is"));
  EXPECT_THAT(request_error([](auto& o) { o.sampling.logit_bias = {{100, 1.0F}}; }), HasSubstr("logit_bias names token 100"));
  EXPECT_THAT(request_error([](auto& o) { o.sampling.logit_bias = {{9, std::nanf("")}}; }), HasSubstr("logit_bias of token 9"));
  EXPECT_THAT(request_error([](auto& o) { o.stop_tokens = {-1}; }), HasSubstr("stop_tokens names token -1"));
  for (const int wrong : {0, -2}) EXPECT_THAT(request_error([&](auto& o) { o.max_tokens = wrong; }), HasSubstr("max_tokens is"));
  EXPECT_THAT(request_error([](auto& o) { o.min_tokens = -1; }), HasSubstr("min_tokens is -1"));
  EXPECT_THAT(request_error([](auto& o) { o.min_tokens = 17; }), HasSubstr("min_tokens is 17, above max_tokens 16"));
  EXPECT_THAT(request_error([](auto& o) { o.n = 0; }), HasSubstr("n is 0"));
  EXPECT_THAT(request_error([](auto& o) { o.filters.resize(2); }), HasSubstr("2 filters came for n = 1"));
  EXPECT_THAT(request_error([](auto& o) { o.filters.resize(1); }), HasSubstr("a filter is null"));
}

TEST(EngineOptions, EachWrongValueIsNamed) {
  EXPECT_EQ(engine_error([](auto&) {}), "accepted");
  EXPECT_THAT(engine_error([](auto& o) { o.dtype = "fp8"; }), AllOf(HasSubstr("dtype is \"fp8\""), HasSubstr("w8a8")));
  for (const char* device : {"gpu", "cuda:", "cuda:x", "cuda:0:1", "CPU", "", "cuda:1234"})
    EXPECT_THAT(engine_error([&](auto& o) { o.device = device; }), HasSubstr(std::string("device is \"") + device + "\"")) << device;
  for (const char* device : {"cpu", "cuda", "cuda:0", "cuda:11"})
    EXPECT_EQ(engine_error([&](auto& o) { o.device = device; }), "accepted") << device;
  EXPECT_THAT(engine_error([](auto& o) { o.kv_dtype = "fp16"; }), HasSubstr("kv_dtype is \"fp16\""));
  EXPECT_THAT(engine_error([](auto& o) { o.threads = -1; }), HasSubstr("threads is -1"));
  EXPECT_THAT(engine_error([](auto& o) { o.kv_cache_tokens = -1; }), HasSubstr("kv_cache_tokens is -1"));
  EXPECT_THAT(engine_error([](auto& o) { o.kv_cache_bytes = 0; }), HasSubstr("kv_cache_bytes is 0"));
  EXPECT_EQ(engine_error([](auto& o) { o.kv_cache_bytes = 0, o.kv_cache_tokens = 100; }), "accepted");
  EXPECT_THAT(engine_error([](auto& o) { o.step_tokens = -1; }), HasSubstr("step_tokens is -1"));
  EXPECT_THAT(engine_error([](auto& o) { o.max_sequences = 0; }), HasSubstr("max_sequences is 0"));
  EXPECT_THAT(engine_error([](auto& o) { o.max_waiting = 0; }), HasSubstr("max_waiting is 0"));
  EXPECT_THAT(engine_error([](auto& o) { o.max_context = -1; }), HasSubstr("max_context is -1"));
}

TEST(FinishName, IsTheWordOfTheAPI) {
  EXPECT_STREQ(finish_name(Finish::none), "");
  EXPECT_STREQ(finish_name(Finish::stop), "stop");
  EXPECT_STREQ(finish_name(Finish::length), "length");
  EXPECT_STREQ(finish_name(Finish::cancelled), "cancelled");
  EXPECT_STREQ(finish_name(Finish::error), "error");
}

}  // namespace
}  // namespace unshard::inference
