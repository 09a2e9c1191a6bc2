#pragma once
// A byte-level GPT as any torch program would write it: nothing here knows of Unshard.
// Shapes: B sequences, T tokens, C width, H heads, N = C / H.
#include <torch/torch.h>

#include <cmath>
#include <cstdint>
#include <string>

namespace example {

struct GptOptions {
  std::int64_t layers = 6, heads = 6, width = 384, context = 256, vocabulary = 256;
};

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(const GptOptions& options) : heads(options.heads) {
    const auto width = options.width;
    attention_norm = register_module("attention_norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    qkv = register_module("qkv", torch::nn::Linear(width, 3 * width));
    attention_out = register_module("attention_out", torch::nn::Linear(width, width));
    mlp_norm = register_module("mlp_norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    up = register_module("up", torch::nn::Linear(width, 4 * width));
    down = register_module("down", torch::nn::Linear(4 * width, width));
  }

  torch::Tensor forward(torch::Tensor x_BTC) {
    const auto B = x_BTC.size(0), T = x_BTC.size(1), C = x_BTC.size(2);
    const auto qkv_3BHTN = qkv(attention_norm(x_BTC)).view({B, T, 3, heads, C / heads}).permute({2, 0, 3, 1, 4});
    const auto mixed_BHTN =
        at::scaled_dot_product_attention(qkv_3BHTN[0], qkv_3BHTN[1], qkv_3BHTN[2], /*attn_mask=*/{}, /*dropout_p=*/0.0, /*is_causal=*/true);
    x_BTC = x_BTC + attention_out(mixed_BHTN.transpose(1, 2).reshape({B, T, C}));
    return x_BTC + down(torch::gelu(up(mlp_norm(x_BTC))));
  }

  std::int64_t heads;
  torch::nn::LayerNorm attention_norm{nullptr}, mlp_norm{nullptr};
  torch::nn::Linear qkv{nullptr}, attention_out{nullptr}, up{nullptr}, down{nullptr};
};
TORCH_MODULE(Block);

struct GptImpl : torch::nn::Module {
  explicit GptImpl(const GptOptions& options) : options(options) {
    tokens = register_module("tokens", torch::nn::Embedding(options.vocabulary, options.width));
    positions = register_module("positions", torch::nn::Embedding(options.context, options.width));
    blocks = register_module("blocks", torch::nn::ModuleList());
    for (std::int64_t i = 0; i < options.layers; ++i) blocks->push_back(Block(options));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({options.width})));

    const torch::NoGradGuard no_grad;
    for (auto& item : named_parameters()) {
      if (item.value().dim() < 2) continue;  // norms stay 1 and 0, biases are set below
      const bool residual = item.key().find("attention_out") != std::string::npos || item.key().find("down") != std::string::npos;
      item.value().normal_(0, residual ? 0.02 / std::sqrt(2.0 * static_cast<double>(options.layers)) : 0.02);
    }
    for (auto& item : named_parameters())
      if (item.key().ends_with("bias")) item.value().zero_();
  }

  /// [B, T] bytes as int64 -> [B, T, vocabulary]. The head's weight is the embedding's.
  torch::Tensor forward(const torch::Tensor& tokens_BT) {
    const auto T = tokens_BT.size(1);
    auto x_BTC = tokens(tokens_BT) + positions(torch::arange(T, tokens_BT.options()));
    for (const auto& block : *blocks) x_BTC = block->as<Block>()->forward(x_BTC);
    return torch::nn::functional::linear(norm(x_BTC), tokens->weight);
  }

  /// Mean cross entropy in fp32, nats a byte.
  torch::Tensor loss(const torch::Tensor& tokens_BT, const torch::Tensor& targets_BT) {
    const auto logits = forward(tokens_BT).to(torch::kFloat);
    return torch::nn::functional::cross_entropy(logits.flatten(0, 1), targets_BT.flatten());
  }

  /// `prompt` and `length` more bytes, drawn from the 20 likeliest at each place.
  std::string generate(const std::string& prompt, std::int64_t length, double temperature = 0.8) {
    const torch::NoGradGuard no_grad;
    std::string text = prompt;
    for (std::int64_t i = 0; i < length; ++i) {
      const auto begin = text.size() > static_cast<std::size_t>(options.context) ? text.size() - options.context : 0;
      auto window = torch::empty({1, static_cast<std::int64_t>(text.size() - begin)}, torch::kLong);
      for (std::size_t t = begin; t < text.size(); ++t) window[0][t - begin] = static_cast<unsigned char>(text[t]);
      const auto [values, bytes] = forward(window)[0][-1].to(torch::kFloat).topk(std::min<std::int64_t>(20, options.vocabulary));
      const auto pick = torch::multinomial(torch::softmax(values / temperature, -1), 1);
      text += static_cast<char>(bytes[pick.item<std::int64_t>()].item<std::int64_t>());
    }
    return text;
  }

  GptOptions options;
  torch::nn::Embedding tokens{nullptr}, positions{nullptr};
  torch::nn::ModuleList blocks{nullptr};
  torch::nn::LayerNorm norm{nullptr};
};
TORCH_MODULE(Gpt);

}  // namespace example
