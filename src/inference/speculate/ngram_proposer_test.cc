#include "inference/speculate/ngram_proposer.h"

#include <gtest/gtest.h>

#include <memory>
#include <random>

namespace unshard::inference {
namespace {

NgramIndex index_of(const std::vector<Token>& tokens) {
  NgramIndex index;
  for (const auto token : tokens) index.append(token);
  return index;
}

/// By looking everywhere: the latest earlier place where the last n tokens came, for the largest n up to kLongest that has one.
NgramIndex::Match search(const std::vector<Token>& tokens) {
  const auto end = static_cast<std::int64_t>(tokens.size());
  for (std::int64_t n = std::min(NgramIndex::kLongest, end - 1); n > 0; --n) {
    for (std::int64_t next = end - 1; next >= n; --next) {
      std::int64_t length = 0;
      while (length < std::min(next, NgramIndex::kMatch) &&
             tokens[static_cast<std::size_t>(next - 1 - length)] == tokens[static_cast<std::size_t>(end - 1 - length)])
        ++length;
      if (length >= n) return {length, next};
    }
  }
  return {};
}

TEST(NgramIndex, FindsTheLatestPlaceOfTheLongestMatch) {
  std::mt19937 random(1);
  for (const int kinds : {2, 3, 10}) {
    std::vector<Token> tokens;
    NgramIndex index;
    for (int i = 0; i < 300; ++i) {
      const auto token = static_cast<Token>(random() % static_cast<unsigned>(kinds));
      tokens.push_back(token);
      index.append(token);
      const auto found = index.find(), wanted = search(tokens);
      ASSERT_EQ(found.length, wanted.length) << kinds << " kinds, token " << i;
      ASSERT_EQ(found.next, wanted.next) << kinds << " kinds, token " << i;
    }
  }
}

TEST(NgramIndex, GoesOnAfterASharedBeginning) {
  std::mt19937 random(2);
  for (const int kinds : {2, 3, 10}) {
    std::vector<Token> tokens(60);
    for (auto& token : tokens) token = static_cast<Token>(random() % static_cast<unsigned>(kinds));
    const auto beginning = std::make_shared<const NgramIndex>(index_of(tokens));
    for (int sequence = 0; sequence < 3; ++sequence) {
      auto all = tokens;
      NgramIndex index(beginning);
      for (int i = 0; i < 100; ++i) {
        const auto found = index.find(), wanted = search(all);
        ASSERT_EQ(found.length, wanted.length) << kinds << " kinds, token " << i;
        ASSERT_EQ(found.next, wanted.next) << kinds << " kinds, token " << i;
        ASSERT_EQ(index.read(found, 20), index_of(all).read(wanted, 20));
        all.push_back(static_cast<Token>(random() % static_cast<unsigned>(kinds)));
        index.append(all.back());
      }
    }
  }
}

TEST(NgramIndex, ReadsWhatFollowedAndGoesOnWithAPeriod) {
  auto index = index_of({7, 1, 2, 3, 4, 5, 6, 9, 1, 2, 3});
  EXPECT_EQ(index.find().length, 3);
  EXPECT_EQ(index.read(index.find(), 3), (std::vector<Token>{4, 5, 6}));
  index = index_of({9, 1, 2, 1, 2});
  EXPECT_EQ(index.read(index.find(), 5), (std::vector<Token>{1, 2, 1, 2, 1}));
  index = index_of({4, 4});
  EXPECT_EQ(index.read(index.find(), 3), (std::vector<Token>{4, 4, 4}));
}

TEST(NgramIndex, GuessesNothingWhereTheLastTokenIsNew) {
  EXPECT_EQ(NgramIndex().find().length, 0);
  EXPECT_EQ(index_of({1}).find().length, 0);
  const auto index = index_of({1, 2, 3});
  EXPECT_EQ(index.find().length, 0);
  EXPECT_TRUE(index.read(index.find(), 4).empty());
}

TEST(NgramProposer, KeepsSequencesApart) {
  NgramProposer proposer;
  proposer.add(1, std::vector<Token>{1, 2, 3, 1});
  proposer.add(2, std::vector<Token>{1, 7, 8, 1});
  std::vector<Proposal> proposals{{1, 9, 2, nullptr, {}, 0}, {2, 9, 1, nullptr, {}, 0}};
  proposer.propose(proposals);
  EXPECT_EQ(proposals[0].tokens, (std::vector<Token>{2, 3}));
  EXPECT_EQ(proposals[1].tokens, (std::vector<Token>{7}));
  EXPECT_EQ(proposals[0].match, 1);
  proposer.remove(1);
  proposer.append(2, 7);
  proposals.erase(proposals.begin());
  proposer.propose(proposals);
  EXPECT_EQ(proposals[0].tokens, (std::vector<Token>{8}));
  EXPECT_EQ(proposals[0].match, 2);
}

TEST(NgramProposer, IndexesAPromptOnceAndNotWhileItWaits) {
  NgramProposer proposer;
  const std::vector<Token> prompt{1, 2, 3, 1};
  for (SequenceId id = 0; id < 100; ++id) proposer.add(id, prompt);
  proposer.add(100, std::vector<Token>{4, 5, 4});
  EXPECT_EQ(proposer.indexed_prompts(), 0);
  for (SequenceId id = 0; id < 100; ++id) proposer.append(id, id % 2 == 0 ? 2 : 3);
  EXPECT_EQ(proposer.indexed_prompts(), 1);
  std::vector<Proposal> proposals{{6, 9, 1, nullptr, {}, 0}, {7, 9, 1, nullptr, {}, 0}};
  proposer.propose(proposals);
  EXPECT_EQ(proposals[0].tokens, (std::vector<Token>{3}));
  EXPECT_EQ(proposals[1].tokens, (std::vector<Token>{1}));
}

}  // namespace
}  // namespace unshard::inference
