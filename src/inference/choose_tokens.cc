#include "inference/choose_tokens.h"

#include <algorithm>
#include <atomic>

namespace unshard::inference {

TokenChooser::TokenChooser(std::int64_t vocab, const std::vector<Token>& end_tokens, Workers& workers)
    : vocab_(vocab), end_tokens_(end_tokens.begin(), end_tokens.end()), workers_(workers) {
  for (std::int64_t i = 0; i < workers.count(); ++i) samplers_.push_back(std::make_unique<Sampler>(vocab));
}

void TokenChooser::choose(std::vector<Draw>& draws, std::span<float> logits) {
  std::vector<Turn> turns;
  const auto row = static_cast<std::size_t>(vocab_);
  for (auto& draw : draws) {
    turns.push_back({&draw, logits.first(row), {}});
    logits = logits.subspan(row * (1 + draw.guesses.size()));
  }
  while (!turns.empty()) {
    for (auto& turn : turns) {
      try {
        mask(*turn.draw->generation, turn.allowed);
      } catch (const std::exception& error) {
        turn.draw->error = error.what();
      }
    }
    choose_each(turns);
    std::erase_if(turns, [&](Turn& turn) { return settle(*turn.draw); });
    for (auto& turn : turns) turn.logits = {turn.logits.data() + row, row};
  }
}

namespace {

bool leaves_none(std::span<const std::uint32_t> allowed, std::int64_t vocab) {
  const auto last = vocab % 32 == 0 ? ~std::uint32_t{0} : (std::uint32_t{1} << (vocab % 32)) - 1;  // what lies beyond is nobody's
  return std::ranges::all_of(allowed.first(allowed.size() - 1), [](std::uint32_t word) { return word == 0; }) &&
         (allowed.back() & last) == 0;
}

}  // namespace

/// Which tokens may come: the request's filter, and no end before min_tokens, unless the filter leaves nothing else.
void TokenChooser::mask(const Generation& generation, std::vector<std::uint32_t>& allowed) const {
  allowed.clear();
  const bool early = static_cast<std::int64_t>(generation.generated.size()) < generation.options->min_tokens;
  if (!generation.filter && !early) return;
  allowed.assign(static_cast<std::size_t>((vocab_ + 31) / 32), ~std::uint32_t{0});
  if (generation.filter) generation.filter->restrict(generation.generated, allowed);
  if (!early) return;
  const auto filtered = generation.filter ? allowed : std::vector<std::uint32_t>{};
  const auto forbid = [&](Token token) {
    if (token >= 0 && token < vocab_) allowed[static_cast<std::size_t>(token) / 32] &= ~(std::uint32_t{1} << (token % 32));
  };
  for (const auto token : end_tokens_) forbid(token);
  for (const auto token : generation.options->stop_tokens) forbid(token);
  if (generation.filter && leaves_none(allowed, vocab_)) allowed = filtered;
}

void TokenChooser::choose_each(std::vector<Turn>& turns) {
  if (turns.size() == 1) return choose_one(turns.front(), *samplers_.front());
  std::atomic<std::size_t> next{0};
  workers_.run([&](std::int64_t worker) {
    for (std::size_t i; (i = next.fetch_add(1)) < turns.size();) choose_one(turns[i], *samplers_[static_cast<std::size_t>(worker)]);
  });
}

void TokenChooser::choose_one(Turn& turn, Sampler& sampler) const {
  if (!turn.draw->error.empty()) return;
  try {
    turn.draw->choices.push_back(sampler.choose(turn.draw->generation->sampler, turn.logits, turn.allowed));
  } catch (const std::exception& error) {
    turn.draw->error = error.what();
  }
}

/// The token just drawn joins the sequence. \return true: no other comes in this step
bool TokenChooser::settle(Draw& draw) const {
  if (!draw.error.empty()) return true;
  auto& generated = draw.generation->generated;
  const auto& options = *draw.generation->options;
  const Token token = draw.choices.back().token;
  generated.push_back(token);
  const bool stopped =
      std::ranges::find(options.stop_tokens, token) != options.stop_tokens.end() || (!options.ignore_eos && end_tokens_.contains(token));
  const bool full = static_cast<std::int64_t>(generated.size()) >= options.max_tokens;
  draw.finish = stopped ? Finish::stop : full ? Finish::length : Finish::none;
  const auto at = draw.choices.size() - 1;  // the guess that this token had to equal
  return draw.finish != Finish::none || at >= draw.guesses.size() || draw.guesses[at] != token;
}

}  // namespace unshard::inference
