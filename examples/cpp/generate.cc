// Generate text from C++: tokens in, tokens out. `generate MODEL TOKEN...` prints the tokens that follow, as they come.
// (Text to tokens and back is the tokenizer's work; `unshard generate` has Hugging Face's.)
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <vector>

#include "unshard/inference/engine.h"

int main(int count, char** arguments) {
  if (count < 3) {
    std::fprintf(stderr, "usage: %s MODEL TOKEN...   (a Hugging Face folder or a GGUF file)\n", arguments[0]);
    return 2;
  }
  try {
    std::vector<unshard::inference::Token> prompt;
    for (int i = 2; i < count; ++i) prompt.push_back(static_cast<unshard::inference::Token>(std::atoi(arguments[i])));

    unshard::inference::Engine engine(arguments[1], {.dtype = "auto", .kv_cache_tokens = 4096});
    unshard::inference::RequestOptions options;
    options.max_tokens = 32;
    options.sampling.temperature = 0;
    engine.submit(prompt, options);
    for (bool ended = false; !ended;) {
      for (const auto& output : engine.poll(/*timeout_s=*/60)) {
        if (output.token >= 0) std::printf("%d ", output.token);
        ended = ended || output.finish != unshard::inference::Finish::none;
      }
      std::fflush(stdout);
    }
    std::printf("\n");
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "generate: %s\n", error.what());
    return 1;
  }
}
