#include "inference/speculate/speculator.h"

#include <algorithm>

#include "inference/speculate/draft_proposer.h"
#include "inference/speculate/ngram_proposer.h"
#include "unshard/core/error.h"

namespace unshard::inference {
namespace {

constexpr double kOfSequence = 1.0 / 8, kOverall = 1.0 / 64;  // weight of the latest guess in the averages
constexpr std::int64_t kInStep = 4;                           // tokens that a draft is behind from one step to the next
constexpr std::int64_t kLongAnswer = 256;                     // an answer may end long before its max_tokens

}  // namespace

Speculator::Speculator(std::unique_ptr<Proposer> proposer, const EngineOptions& options)
    : proposer_(std::move(proposer)), most_guesses_(options.guesses), step_tokens_(options.step_tokens), always_(options.always_guess) {}

void Speculator::measure(Runner& target) {
  cost_ = StepCost::measure(target, step_tokens_);
  proposer_->measure();
}

void Speculator::add(SequenceId id, std::span<const Token> prompt) {
  proposer_->add(id, prompt);
  sequences_[id].acceptance = overall_;
}

void Speculator::remove(SequenceId id) {
  proposer_->remove(id);
  sequences_.erase(id);
}

/// Of each guess of a proposal, or of each that a draft model could make.
std::vector<double> Speculator::chances(const Proposal& proposal) const {
  const auto& acceptance = sequences_.at(proposal.sequence).acceptance;
  const bool made = proposer_->cost() == nullptr;
  const auto count = made ? static_cast<std::int64_t>(proposal.tokens.size()) : proposal.most;
  std::vector<double> chances;
  double chance = 1;
  for (std::int64_t i = 0; i < count; ++i) {
    chance *= acceptance.of(made ? proposal.match + i : 0);
    chances.push_back(chance);
  }
  return chances;
}

/// Sets `most` of each. A draft that is far behind (it has not seen the prompt yet) must win the time of catching up back until the
/// sequence's end, and as much again: what it wins is a guess too.
void Speculator::keep_what_pays(std::vector<Proposal>& wanted, std::int64_t room) {
  const StepCost* drafting = proposer_->cost();
  std::vector<Outlook> outlooks;
  std::vector<std::int64_t> behind;
  for (const auto& proposal : wanted) {
    behind.push_back(proposer_->behind(proposal.sequence));
    outlooks.push_back({chances(proposal), std::min(behind.back(), kInStep)});
  }
  const auto rows = step_tokens_ - room;
  const auto plan = guesses_that_pay(outlooks, rows, room, cost_.value(), drafting);
  const double won_a_token = (1 - 1 / plan.gain) * cost_->seconds(rows) / static_cast<double>(rows);
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    const double won = won_a_token * static_cast<double>(std::min(wanted[i].left, kLongAnswer));
    const bool worth = behind[i] <= kInStep || 2 * cost_->load() * drafting->seconds_of_many(behind[i]) < won;
    wanted[i].most = worth ? plan.guesses[i] : 0;
  }
}

std::vector<Proposal> Speculator::propose(std::vector<Proposal> wanted, std::int64_t room) {
  const bool free = proposer_->cost() == nullptr;
  for (auto& proposal : wanted) proposal.most = std::clamp<std::int64_t>(proposal.left, 0, most_guesses_);
  if (free) proposer_->propose(wanted);
  if (!always_) keep_what_pays(wanted, room);
  if (!free) {
    for (const auto& proposal : wanted)
      if (proposal.most == 0) sequences_.at(proposal.sequence).acceptance.hope();
    std::erase_if(wanted, [](const Proposal& proposal) { return proposal.most == 0; });
    if (!wanted.empty()) proposer_->propose(wanted);
  }
  for (auto& proposal : wanted) {
    auto& sequence = sequences_.at(proposal.sequence);
    sequence.guesses = proposal.tokens;  // those that aren't computed are compared all the same
    sequence.match = proposal.match;
    proposal.tokens.resize(std::min(proposal.tokens.size(), static_cast<std::size_t>(proposal.most)));
  }
  std::erase_if(wanted, [](const Proposal& proposal) { return proposal.tokens.empty(); });
  return wanted;
}

void Speculator::chosen(SequenceId id, std::span<const Choice> choices) {
  auto& sequence = sequences_.at(id);
  bool right = true;
  for (std::size_t i = 0; i < choices.size(); ++i) {
    const Token token = choices[i].token;
    proposer_->append(id, token);
    if (!right || i >= sequence.guesses.size()) continue;
    right = sequence.guesses[i] == token;
    const auto match = sequence.match == 0 ? 0 : sequence.match + static_cast<std::int64_t>(i);
    sequence.acceptance.learn(match, right, kOfSequence);
    overall_.learn(match, right, kOverall);
  }
  sequence.guesses.clear();
}

namespace {

/// In its file's own number format: a quantised copy of the target is a draft too. It has blocks for as many tokens as the target; as it
/// shares no prefixes it may run out, and then guesses nothing for some.
std::unique_ptr<Proposer> open_draft(const EngineOptions& options, const Runner& target, Workers& workers,
                                     const ModelFactory& other_devices) {
  auto model = open_model(options.speculate);
  require(model.config.vocab == target.info().vocab, "[inference.engine] the draft model ", options.speculate, " has a vocabulary of ",
          model.config.vocab, " tokens and the model one of ", target.info().vocab,
          "; speculate names a smaller model with the same tokenizer");
  auto own = options;
  own.dtype = own.kv_dtype = "auto";
  own.weight_memory_bytes = 0;  // it is small, and isn't waited for
  own.max_context = std::min(target.info().context, model.config.context);
  own.kv_cache_tokens = target.kv_blocks() * kBlockTokens;
  return std::make_unique<DraftProposer>(std::make_unique<Runner>(std::move(model), own, workers, nullptr, other_devices), own, workers);
}

}  // namespace

std::unique_ptr<Speculator> make_speculator(const EngineOptions& options, const Runner& target, Workers& workers,
                                            const ModelFactory& other_devices) {
  if (options.speculate.empty()) return nullptr;
  if (options.speculate == "ngram") return std::make_unique<Speculator>(std::make_unique<NgramProposer>(), options);
  return std::make_unique<Speculator>(open_draft(options, target, workers, other_devices), options);
}

}  // namespace unshard::inference
