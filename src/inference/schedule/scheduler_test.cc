// One fact each about the scheduler, by hand-made cases; the rest is in scheduler_random_test.cc.
#include "inference/schedule/scheduler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <stdexcept>

namespace unshard::inference {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;
using Ids = std::vector<SequenceId>;
using Answers = std::vector<Chosen>;

/// first, first + 1, ...
std::vector<Token> prompt_of(std::int64_t n, Token first = 0) {
  std::vector<Token> tokens(static_cast<std::size_t>(n));
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}
SchedulerOptions options_of(std::int64_t blocks, std::int64_t step_tokens) {
  return {.blocks = blocks, .block_tokens = 4, .step_tokens = step_tokens, .max_sequences = 8};
}
/// Token 100 for each chunk that wants one.
void finish(Scheduler& scheduler, const Step& step) {
  std::vector<Chosen> chosen;
  for (const Chunk& chunk : step.chunks) {
    if (chunk.wants_token) chosen.push_back({chunk.sequence, {100}});
  }
  scheduler.finish_step(chosen);
  scheduler.check();
}
Step run(Scheduler& scheduler) {
  Step step = scheduler.next();
  finish(scheduler, step);
  return step;
}
Ids ids(const Step& step) {
  Ids result;
  for (const Chunk& chunk : step.chunks) result.push_back(chunk.sequence);
  return result;
}
std::vector<std::int64_t> sizes(const Step& step) {
  std::vector<std::int64_t> result;
  for (const Chunk& chunk : step.chunks) result.push_back(static_cast<std::int64_t>(chunk.tokens.size()));
  return result;
}
std::string message_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "nothing was thrown";
}

TEST(Scheduler, ALongPromptIsComputedInChunksOfTheBudgetAndOnlyItsLastWantsAToken) {
  Scheduler scheduler(options_of(100, 32));
  scheduler.add({1, prompt_of(100), 10, 0, 0});
  for (int i = 0; i < 3; ++i) {
    const Step step = run(scheduler);
    EXPECT_THAT(sizes(step), ElementsAre(32));
    EXPECT_EQ(step.chunks[0].position, 32 * i);
    EXPECT_EQ(step.chunks[0].blocks.size(), 8u * (i + 1));
    EXPECT_FALSE(step.chunks[0].wants_token);
  }
  const Step last = run(scheduler);
  EXPECT_THAT(sizes(last), ElementsAre(4));
  EXPECT_TRUE(last.chunks[0].wants_token);
  const Step decode = run(scheduler);
  EXPECT_THAT(decode.chunks[0].tokens, ElementsAre(100));
  EXPECT_EQ(decode.chunks[0].position, 100);
}

TEST(Scheduler, SingleTokensComeFirstAndPromptsFillTheBudgetExactly) {
  Scheduler scheduler(options_of(100, 10));
  for (SequenceId id : {1, 2, 3}) scheduler.add({id, prompt_of(3, static_cast<Token>(10 * id)), 50, 0, 0});
  EXPECT_THAT(sizes(run(scheduler)), ElementsAre(3, 3, 3));  // nothing else was waiting
  scheduler.add({4, prompt_of(12, 60), 50, 0, 0});
  scheduler.add({5, prompt_of(12, 80), 50, -1, 0});
  const Step step = run(scheduler);
  EXPECT_THAT(ids(step), ElementsAre(1, 2, 3, 5));  // the better priority before the earlier arrival
  EXPECT_THAT(sizes(step), ElementsAre(1, 1, 1, 7));
  const Step after = run(scheduler);
  EXPECT_THAT(ids(after), ElementsAre(1, 2, 3, 5, 4));
  EXPECT_THAT(sizes(after), ElementsAre(1, 1, 1, 5, 2));
}

TEST(Scheduler, AShortPromptIsComputedAtOnceBesideALongOneWhichKeepsItsShare) {
  Scheduler scheduler(options_of(1000, 64));
  scheduler.add({1, prompt_of(2000), 5, 0, 0});
  EXPECT_THAT(sizes(run(scheduler)), ElementsAre(64));
  scheduler.add({2, prompt_of(30, 3000), 5, 0, 0});
  scheduler.add({3, prompt_of(18, 4000), 5, 0, 0});
  scheduler.add({4, prompt_of(18, 5000), 5, 0, 0});
  const Step step = run(scheduler);
  EXPECT_THAT(ids(step), ElementsAre(1, 3, 4, 2));  // the oldest's quarter; then those due first
  EXPECT_THAT(sizes(step), ElementsAre(16, 18, 18, 12));
  EXPECT_TRUE(step.chunks[1].wants_token);
  EXPECT_TRUE(step.chunks[2].wants_token);
  const Step after = run(scheduler);
  EXPECT_THAT(ids(after), ElementsAre(3, 4, 1, 2));
  EXPECT_THAT(sizes(after), ElementsAre(1, 1, 44, 18));
}

TEST(Scheduler, ALongPromptIsDoneInTimeUnderAnEndlessStreamOfShortOnes) {
  Scheduler scheduler(options_of(1000, 64));
  scheduler.add({1, prompt_of(1600), 5, 0, 0});
  SequenceId last = 1;
  for (int steps = 1;; ++steps) {
    ASSERT_LE(steps, 4 * 1600 / 64);
    for (int i = 0; i < 5; ++i) {  // more than a step computes
      ++last;
      scheduler.add({last, prompt_of(20, static_cast<Token>(100 * last)), 1, 0, 0});
    }
    const Step step = run(scheduler);
    ASSERT_EQ(step.tokens, 64);
    for (const Chunk& chunk : step.chunks) {
      if (chunk.wants_token && chunk.sequence == 1) return;
      if (chunk.wants_token) scheduler.remove(chunk.sequence);
    }
  }
}

TEST(Scheduler, APromptThatWaitsForLongIsNoLongerOvertakenByShorterOnes) {
  Scheduler scheduler(options_of(1000, 16));
  scheduler.add({1, prompt_of(1000), 5, 0, 0});
  scheduler.add({2, prompt_of(40, 2000), 5, 0, 0});
  for (SequenceId last = 3;; ++last) {
    ASSERT_LE(last, 3 + 12);
    scheduler.add({last, prompt_of(12, static_cast<Token>(100 * last)), 1, 0, 0});  // all that the oldest's quarter leaves
    for (const Chunk& chunk : run(scheduler).chunks) {
      if (chunk.wants_token && chunk.sequence == 2) return;
      if (chunk.wants_token) scheduler.remove(chunk.sequence);
    }
  }
}

TEST(Scheduler, LateChunksOfALongPromptAreShorterAndShortPromptsCostWhatTheyDid) {
  auto options = options_of(1000, 32);
  options.look_back_tokens = 32;
  Scheduler scheduler(options);
  scheduler.add({1, prompt_of(3000), 5, 0, 0});
  EXPECT_THAT(sizes(run(scheduler)), ElementsAre(32));
  EXPECT_THAT(sizes(run(scheduler)), ElementsAre(16));  // each costs 1 + 32 / 32
  EXPECT_THAT(sizes(run(scheduler)), ElementsAre(12));  // 1 + 48 / 32
  for (std::int64_t position = 60; position < 2900;) {
    const auto size = 32 * 32 / std::min<std::int64_t>(32 + position, 32 * 32 / 4);
    EXPECT_THAT(sizes(run(scheduler)), ElementsAre(size));
    position += size;
  }
  scheduler.add({2, prompt_of(5, 5000), 5, 0, 0});
  EXPECT_THAT(sizes(run(scheduler)), ElementsAre(3, 5));
}

TEST(Scheduler, OfEqualPromptsThatComeTogetherOneIsComputed) {
  Scheduler scheduler(options_of(1000, 64));
  for (SequenceId id = 1; id <= 8; ++id) scheduler.add({id, prompt_of(641), 5, 0, 0});
  for (int i = 0; i < 10; ++i) EXPECT_THAT(ids(run(scheduler)), ElementsAre(1));
  EXPECT_THAT(sizes(run(scheduler)), ElementsAre(1, 1, 1, 1, 1, 1, 1, 1));
  EXPECT_EQ(scheduler.counts().shared_tokens, 7 * 640);
  EXPECT_EQ(scheduler.counts().blocks_used, 160 + 8);
}

TEST(Scheduler, EqualBeginningsShareFullBlocksAndTheLastTokenIsAlwaysComputed) {
  Scheduler scheduler(options_of(100, 64));
  scheduler.add({1, prompt_of(12), 5, 0, 0});
  const Step first = run(scheduler);
  scheduler.add({2, prompt_of(12), 5, 0, 0});
  scheduler.add({3, prompt_of(14), 5, 0, 0});
  scheduler.add({4, prompt_of(12), 5, 0, 9});  // another salt
  const Step step = run(scheduler);
  EXPECT_THAT(ids(step), ElementsAre(1, 2, 3, 4));
  EXPECT_THAT(sizes(step), ElementsAre(1, 4, 2, 12));
  EXPECT_EQ(step.chunks[1].position, 8);
  EXPECT_EQ(step.chunks[2].position, 12);
  for (int i = 0; i < 2; ++i) EXPECT_EQ(step.chunks[1].blocks[i], first.chunks[0].blocks[i]);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(step.chunks[2].blocks[i], first.chunks[0].blocks[i]);
  EXPECT_EQ(scheduler.counts().shared_tokens, 20);
}

TEST(Scheduler, SharesNothingWhereItMustNot) {
  auto options = options_of(100, 64);
  options.share_prefixes = false;
  Scheduler scheduler(options);
  scheduler.add({1, prompt_of(12), 5, 0, 0});
  run(scheduler);
  scheduler.add({2, prompt_of(12), 5, 0, 0});
  EXPECT_THAT(sizes(run(scheduler)), ElementsAre(1, 12));
}

TEST(Scheduler, EqualPromptsComputedAtTheSameTimeEndWithOneCopyOfTheirBlocks) {
  Scheduler scheduler(options_of(100, 64));
  scheduler.add({1, prompt_of(13), 5, 0, 0});
  scheduler.add({2, prompt_of(13), 5, 0, 0});
  run(scheduler);
  EXPECT_EQ(scheduler.counts().blocks_used, 3 + 2);
}

TEST(Scheduler, WhatASequenceGeneratedIsSharedToo) {
  Scheduler scheduler(options_of(100, 64));
  scheduler.add({1, prompt_of(6), 6, 0, 0});
  for (int i = 0; i < 6; ++i) run(scheduler);
  scheduler.remove(1);
  EXPECT_EQ(scheduler.counts().blocks_used, 0);
  auto second_turn = prompt_of(6);
  second_turn.insert(second_turn.end(), {100, 100, 100, 100, 100, 100, 7, 8});  // the answer of the first, and a question more
  scheduler.add({2, second_turn, 5, 0, 0});
  EXPECT_EQ(run(scheduler).chunks[0].position, 8);  // 6 + 5 tokens were computed: two full blocks
}

TEST(Scheduler, AForkSharesFullBlocksAndCopiesThePartlyFilledOne) {
  Scheduler scheduler(options_of(100, 64));
  scheduler.add({1, prompt_of(11), 5, 0, 0});
  scheduler.add_fork(1, 2);
  const Step prompt = run(scheduler);
  EXPECT_THAT(ids(prompt), ElementsAre(1));  // the fork waits for it
  const Step step = run(scheduler);
  EXPECT_THAT(ids(step), ElementsAre(1, 2));
  const Chunk &parent = step.chunks[0], &fork = step.chunks[1];
  EXPECT_EQ(fork.position, 10);
  EXPECT_THAT(fork.tokens, ElementsAre(10));
  EXPECT_TRUE(fork.wants_token);
  EXPECT_EQ(fork.blocks[0], parent.blocks[0]);
  EXPECT_EQ(fork.blocks[1], parent.blocks[1]);
  EXPECT_NE(fork.blocks[2], parent.blocks[2]);
  EXPECT_THAT(step.copies, ElementsAre(Pair(parent.blocks[2], fork.blocks[2])));
}

TEST(Scheduler, AForkWhoseLastTokenBeginsABlockNeedsNoCopy) {
  Scheduler scheduler(options_of(100, 64));
  scheduler.add({1, prompt_of(9), 5, 0, 0});
  scheduler.add_fork(1, 2);
  run(scheduler);
  EXPECT_THAT(run(scheduler).copies, IsEmpty());
}

TEST(Scheduler, ForksOfARemovedParentComputeThePromptOnceAndThenShareIt) {
  auto options = options_of(100, 64);
  options.share_prefixes = false;
  Scheduler scheduler(options);
  scheduler.add({1, prompt_of(11), 5, 0, 0});
  scheduler.add_fork(1, 2);
  scheduler.add_fork(2, 3);
  scheduler.add_fork(1, 4);
  scheduler.remove(1);
  EXPECT_EQ(scheduler.counts().waiting, 3);
  EXPECT_THAT(sizes(run(scheduler)), ElementsAre(11));
  const Step step = run(scheduler);
  EXPECT_THAT(ids(step), ElementsAre(2, 3, 4));
  EXPECT_THAT(sizes(step), ElementsAre(1, 1, 1));
  EXPECT_THAT(step.copies.size(), 2u);
}

TEST(Scheduler, OutOfBlocksTheWorstIsPreemptedAndLaterContinuesWhereItWas) {
  auto options = options_of(6, 64);
  options.share_prefixes = false;
  Scheduler scheduler(options);
  scheduler.add({1, prompt_of(7), 18, 0, 0});
  scheduler.add({2, prompt_of(7, 50), 10, 0, 0});
  // Both grow: 3 blocks each hold 12 tokens; the 13th of both isn't there.
  for (int i = 0; i < 6; ++i) EXPECT_THAT(ids(run(scheduler)), ElementsAre(1, 2));
  EXPECT_THAT(ids(run(scheduler)), ElementsAre(1));
  EXPECT_EQ(scheduler.counts().preemptions, 1);
  EXPECT_EQ(scheduler.counts().waiting, 1);
  scheduler.remove(1);
  const Step again = run(scheduler);
  auto all = prompt_of(7, 50);
  all.insert(all.end(), 6, 100);
  EXPECT_EQ(again.chunks[0].tokens, all);
  EXPECT_TRUE(again.chunks[0].wants_token);
  EXPECT_THAT(run(scheduler).chunks[0].tokens, ElementsAre(100));
}

TEST(Scheduler, APreemptedSequenceFindsItsOwnBlocksAgainButThoseThatWereNeeded) {
  Scheduler scheduler(options_of(6, 64));
  scheduler.add({1, prompt_of(7), 18, 0, 0});
  scheduler.add({2, prompt_of(7, 50), 10, 0, 0});
  for (int i = 0; i < 7; ++i) run(scheduler);
  scheduler.remove(1);
  EXPECT_EQ(run(scheduler).chunks[0].position, 8);  // of its three full blocks the last went to sequence 1
}

TEST(Scheduler, ABetterPriorityTakesBlocksAndPlaceOfAWorseOneAndAnEqualOneWaits) {
  auto options = options_of(8, 64);
  options.max_sequences = 2;
  Scheduler scheduler(options);
  scheduler.add({1, prompt_of(12), 5, 1, 0});
  scheduler.add({2, prompt_of(8, 40), 5, 1, 0});
  run(scheduler);
  scheduler.add({3, prompt_of(5, 80), 5, 1, 0});
  EXPECT_THAT(ids(run(scheduler)), ElementsAre(1, 2));
  scheduler.add({4, prompt_of(5, 90), 5, 0, 0});
  EXPECT_THAT(ids(run(scheduler)), ElementsAre(1, 4));
  EXPECT_EQ(scheduler.counts().waiting, 2);
  scheduler.remove(4);
  EXPECT_THAT(ids(run(scheduler)), ElementsAre(1, 2));  // before 3, which came later
}

TEST(Scheduler, ABetterPriorityGetsIntoAStepThatIsFullOfSingleTokens) {
  Scheduler scheduler(options_of(100, 2));
  scheduler.add({1, prompt_of(1), 50, 1, 0});
  scheduler.add({2, prompt_of(1, 9), 50, 1, 0});
  run(scheduler);
  scheduler.add({3, prompt_of(1, 20), 50, 0, 0});
  EXPECT_THAT(ids(run(scheduler)), ElementsAre(1, 3));
}

TEST(Scheduler, APromptIsAdmittedWhenABlockMoreIsThereForEachThatRuns) {
  for (const std::int64_t blocks : {5, 6}) {
    Scheduler scheduler(options_of(blocks, 64));
    scheduler.add({1, prompt_of(7), 2, 0, 0});
    scheduler.add({2, prompt_of(12, 40), 1, 0, 0});  // 2 blocks are taken, 3 are needed, and 1 is for the other
    EXPECT_THAT(ids(run(scheduler)).size(), blocks == 5 ? 1u : 2u);
  }
}

TEST(Scheduler, ASequenceRemovedDuringAStepKeepsItsBlocksUntilTheStepEnds) {
  Scheduler scheduler(options_of(10, 64));
  scheduler.add({1, prompt_of(8), 5, 0, 0});
  scheduler.add({2, prompt_of(8, 40), 5, 0, 0});
  scheduler.next();
  scheduler.remove(1);
  scheduler.remove(1);
  scheduler.check();
  EXPECT_EQ(scheduler.counts().blocks_used, 4);
  scheduler.finish_step(Answers{{2, {5}}});
  EXPECT_EQ(scheduler.counts().blocks_used, 2);
  EXPECT_EQ(scheduler.counts().running, 1);
  scheduler.remove(2);
  scheduler.remove(77);
  EXPECT_EQ(scheduler.counts().blocks_used, 0);
  EXPECT_THAT(scheduler.next().chunks, IsEmpty());
}

TEST(Scheduler, GuessesAreComputedAfterTheLastTokenAndTheAcceptedOnesCount) {
  Scheduler scheduler(options_of(100, 64));
  scheduler.add({1, prompt_of(3), 20, 0, 0});
  run(scheduler);
  EXPECT_EQ(scheduler.most_guesses(1), 18);  // one token came, one will be the model's own
  EXPECT_EQ(scheduler.spare_tokens(), 63);
  scheduler.propose(1, std::vector<Token>{7, 8, 9});
  const Step step = scheduler.next();
  ASSERT_EQ(step.chunks.size(), 1u);
  EXPECT_THAT(step.chunks[0].tokens, ElementsAre(100, 7, 8, 9));
  EXPECT_EQ(step.chunks[0].drafts, 3);
  EXPECT_EQ(step.chunks[0].blocks.size(), 2u);
  EXPECT_EQ(step.tokens, 4);
  scheduler.finish_step(Answers{{1, {7, 8, 50}}});
  scheduler.check();
  const Step after = scheduler.next();  // guesses were for one step
  EXPECT_THAT(after.chunks[0].tokens, ElementsAre(50));
  EXPECT_EQ(after.chunks[0].position, 6);
  EXPECT_EQ(after.chunks[0].drafts, 0);
}

TEST(Scheduler, BlocksOfGuessesThatWereNotAcceptedAreGivenBack) {
  Scheduler scheduler(options_of(10, 64));
  scheduler.add({1, prompt_of(3), 20, 0, 0});
  run(scheduler);
  scheduler.propose(1, std::vector<Token>(10, 7));
  const Step step = scheduler.next();
  EXPECT_EQ(scheduler.counts().blocks_used, 4);  // 14 tokens
  finish(scheduler, step);
  EXPECT_EQ(scheduler.counts().blocks_used, 2);  // 5 tokens
}

TEST(Scheduler, SingleTokensAndPromptsComeBeforeGuessesWhichShareWhatIsLeft) {
  Scheduler scheduler(options_of(100, 16));
  scheduler.add({1, prompt_of(3), 50, 0, 0});
  scheduler.add({2, prompt_of(3, 40), 50, 0, 0});
  run(scheduler);
  const std::vector<Token> many(20, 7);
  const auto propose = [&] {
    for (const SequenceId id : {1, 2}) scheduler.propose(id, many);
  };
  propose();
  EXPECT_THAT(sizes(run(scheduler)), ElementsAre(8, 8));
  scheduler.add({3, prompt_of(9, 80), 50, 0, 0});
  propose();
  EXPECT_THAT(sizes(run(scheduler)), ElementsAre(3, 4, 9));
  scheduler.add({4, prompt_of(30, 120), 50, 0, 0});
  propose();
  EXPECT_THAT(sizes(run(scheduler)), ElementsAre(1, 1, 1, 13));
}

TEST(Scheduler, GuessesNeverGoBeyondMaxTokensNorTheBlocksThatNobodyHas) {
  Scheduler scheduler(options_of(4, 64));
  scheduler.add({1, prompt_of(3), 4, 0, 0});
  scheduler.add({2, prompt_of(3, 40), 13, 0, 0});
  run(scheduler);
  for (const SequenceId id : {1, 2}) scheduler.propose(id, std::vector<Token>(20, 7));
  EXPECT_THAT(sizes(run(scheduler)), ElementsAre(3, 5));  // two blocks each
  EXPECT_EQ(scheduler.counts().preemptions, 0);
}

TEST(Scheduler, NoGuessesAreTakenForASequenceThatDoesNotJustWantItsNextToken) {
  Scheduler scheduler(options_of(10, 6));
  scheduler.add({1, prompt_of(12), 20, 0, 0});
  const auto propose = [&](SequenceId id) { scheduler.propose(id, std::vector<Token>(2, 7)); };
  propose(1);  // waits
  propose(9);  // unknown
  EXPECT_THAT(sizes(run(scheduler)), ElementsAre(6));
  propose(1);  // lacks six
  EXPECT_THAT(sizes(run(scheduler)), ElementsAre(6));
  propose(1);
  EXPECT_THAT(sizes(run(scheduler)), ElementsAre(3));
}

TEST(Scheduler, FinishStepRefusesTokensThatAreNotTheGuesses) {
  Scheduler scheduler(options_of(100, 64));
  scheduler.add({1, prompt_of(3), 20, 0, 0});
  run(scheduler);
  scheduler.propose(1, std::vector<Token>{7, 8});
  scheduler.next();
  const auto told = [&](std::vector<Token> tokens) { return message_of([&] { scheduler.finish_step(Answers{{1, std::move(tokens)}}); }); };
  EXPECT_THAT(told({7, 9, 5}), HasSubstr("got other tokens before its last"));
  EXPECT_THAT(told({7, 8, 5, 5}), HasSubstr("at most 1 + drafts"));
  EXPECT_THAT(told({}), HasSubstr("wants a token and got none"));
  EXPECT_EQ(told({7, 8, 5}), "nothing was thrown");
  scheduler.check();
}

TEST(Scheduler, WrongUseIsRefusedByName) {
  Scheduler scheduler(options_of(4, 64));
  EXPECT_THAT(message_of([&] { scheduler.add({1, {}, 5, 0, 0}); }), HasSubstr("empty prompt"));
  EXPECT_THAT(message_of([&] { scheduler.add({1, prompt_of(10), 8, 0, 0}); }), HasSubstr("may need 17 tokens"));
  scheduler.add({1, prompt_of(10), 7, 0, 0});
  EXPECT_THAT(message_of([&] { scheduler.add({1, prompt_of(2), 1, 0, 0}); }), HasSubstr("sequence 1 is here already"));
  EXPECT_THAT(message_of([&] { scheduler.add_fork(3, 4); }), HasSubstr("sequence 3 has ended or was never added"));
  EXPECT_THAT(message_of([] { Scheduler wrong(options_of(0, 64)); }), HasSubstr("blocks is 0"));
  EXPECT_THAT(message_of([] { Scheduler wrong(options_of(4, 0)); }), HasSubstr("step_tokens is 0"));
}

TEST(Scheduler, FinishStepWantsExactlyTheTokensAskedForAndChangesNothingOtherwise) {
  Scheduler scheduler(options_of(100, 6));
  scheduler.add({1, prompt_of(3), 5, 0, 0});
  scheduler.add({2, prompt_of(8, 40), 5, 0, 0});
  scheduler.next();
  EXPECT_THAT(message_of([&] { scheduler.finish_step(Answers{}); }), HasSubstr("sequence 1 wants a token"));
  EXPECT_THAT(message_of([&] { scheduler.finish_step(Answers{{1, {5}}, {2, {5}}}); }), HasSubstr("sequence 2 wanted no token"));
  EXPECT_THAT(message_of([&] { scheduler.finish_step(Answers{{1, {5}}, {1, {5}}}); }), HasSubstr("sequence 1 was named twice"));
  EXPECT_THAT(message_of([&] { scheduler.finish_step(Answers{{1, {5, 6}}}); }), HasSubstr("sequence 1 got more tokens than its guesses"));
  EXPECT_THROW(scheduler.next(), std::logic_error);
  scheduler.check();
  scheduler.finish_step(Answers{{1, {5}}, {99, {5}}});
  scheduler.check();
  EXPECT_THAT(sizes(scheduler.next()), ElementsAre(1, 5));
}

}  // namespace
}  // namespace unshard::inference
