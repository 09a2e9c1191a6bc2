// Random programs against the simulated cache of schedule_world.h: every chunk reads the right prefix, every answer equals the solo run's,
// the promises of schedule_state.h hold in every step, and all blocks come back.
#include "core/soak.h"
#include "inference/schedule/schedule_world.h"

namespace unshard::inference {
namespace {

struct Totals {
  std::int64_t steps = 0, full = 0, finished = 0, preemptions = 0, shared = 0, guessed = 0, accepted = 0, at_once = 0;
};

std::int64_t between(std::mt19937& random, std::int64_t low, std::int64_t high) {
  return low + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(high - low + 1));
}

void add_random(std::mt19937& random, ScheduleWorld& world, std::int64_t capacity, int priorities) {
  const std::int64_t prompt = between(random, 1, random() % 4 ? std::min<std::int64_t>(capacity, 12) : capacity);
  const std::int64_t max_tokens = between(random, 1, std::min<std::int64_t>(capacity + 1 - prompt, 20));
  std::vector<Token> tokens(static_cast<std::size_t>(prompt));
  // Beginnings repeat: ones, then a few random tokens.
  const std::int64_t ones = between(random, 0, prompt);
  for (std::int64_t i = 0; i < prompt; ++i) tokens[static_cast<std::size_t>(i)] = i < ones ? 1 : static_cast<Token>(random() % 2);
  world.add(std::move(tokens), max_tokens, between(random, 0, priorities - 1), random() % 8 == 0);
}

void run_program(std::uint32_t seed, std::uint64_t hash_mask, Totals& totals) {
  SCOPED_TRACE("program " + std::to_string(seed));
  std::mt19937 random(seed);
  SchedulerOptions options;
  options.blocks = between(random, 1, random() % 3 ? 12 : 60);
  options.block_tokens = between(random, 1, 5);
  options.step_tokens = between(random, 1, random() % 2 ? 6 : 40);
  options.max_sequences = between(random, 1, 8);
  options.look_back_tokens = random() % 2 ? 0 : between(random, 1, 40);
  options.share_prefixes = random() % 4 != 0;
  const int priorities = random() % 2 ? 1 : 3, forks = random() % 2 ? 0 : 3, removals = random() % 2 ? 0 : 2, guesses = random() % 2;
  ScheduleWorld world(options, hash_mask, seed);
  for (std::int64_t busy = between(random, 5, 40); busy > 0; --busy) {
    while (random() % 3 == 0) add_random(random, world, options.blocks * options.block_tokens, priorities);
    for (int i = 0; i < forks && random() % 4 == 0; ++i) {
      if (const SequenceId parent = world.any()) world.fork(parent);
    }
    for (int i = 0; i < removals && random() % 6 == 0; ++i) world.remove(world.any());
    if (guesses) world.guess();
    world.step(random() % 8 < static_cast<unsigned>(removals) ? 1 : 0);
    if (::testing::Test::HasFatalFailure()) return;
  }
  const std::int64_t patience = world.steps + 5000;
  while (!world.idle() && world.steps < patience) {
    if (guesses) world.guess();
    world.step();
    if (::testing::Test::HasFatalFailure()) return;
  }
  ASSERT_TRUE(world.idle()) << "not done after 5000 steps";
  const auto counts = world.state().counts();
  ASSERT_EQ(counts.blocks_used + counts.running + counts.waiting, 0);
  totals.steps += world.steps;
  totals.full += world.full_steps;
  totals.finished += world.finished;
  totals.preemptions += counts.preemptions;
  totals.shared += counts.shared_tokens;
  totals.guessed += world.guessed;
  totals.accepted += world.accepted;
  totals.at_once += world.prompts_at_once;
}

Totals run_programs(std::uint32_t first, std::uint32_t count, std::uint64_t hash_mask) {
  Totals totals;
  for (std::uint32_t i = 0; i < count * static_cast<std::uint32_t>(testing::soak()) && !::testing::Test::HasFatalFailure(); ++i) {
    run_program(first + i, hash_mask, totals);
  }
  return totals;
}

TEST(SchedulerPrograms, EveryPromiseHoldsUnderAnyInterleaving) {
  const Totals totals = run_programs(1, 1500, ~std::uint64_t{0});
  // The programs reach what they are for.
  EXPECT_GT(totals.finished, 10000);
  EXPECT_GT(totals.preemptions, 1000);
  EXPECT_GT(totals.shared, 10000);
  EXPECT_GT(totals.full, 5000);
  EXPECT_GT(totals.guessed, 10000);
  EXPECT_GT(totals.accepted, 5000);
  EXPECT_GT(totals.at_once, 2000);
}

TEST(SchedulerPrograms, HashesThatCollideAllTheTimeShareNothingWrong) {
  const Totals totals = run_programs(1'000'000, 500, 3);
  EXPECT_GT(totals.shared, 1000);
}

}  // namespace
}  // namespace unshard::inference
