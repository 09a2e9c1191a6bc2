// What ranks tell each other of failures: once, with the rank where they began.
#include "comm/failure_text.h"

#include <gtest/gtest.h>

namespace unshard::comm {
namespace {

TEST(FailureText, ACauseOfOnesOwnIsToldWithoutWhoSaysIt) {
  EXPECT_EQ(failure_to_tell("[comm.barrier 'step'] no progress for 8 s: rank 1: idle, step 0; this is rank 2 of 3"),
            "[comm.barrier 'step'] no progress for 8 s: rank 1: idle, step 0");
  EXPECT_EQ(failure_to_tell("KeyboardInterrupt in [comm.barrier 'step']\nmore"), "KeyboardInterrupt in [comm.barrier 'step']");
  EXPECT_EQ(failure_to_tell("frank 3 failed: it isn't one of ours"), "frank 3 failed: it isn't one of ours");
  EXPECT_EQ(failure_to_tell("rank many failed: no number"), "rank many failed: no number");
}

TEST(FailureText, WhatWasHeardIsHandedOnAsItBegan) {
  const std::string heard = "[comm.all_gather 'x'] rank 2 failed: [comm.all_gather 'x'] rank 0 failed: why; this is rank 2 of 3 in step 1";
  EXPECT_EQ(failure_to_tell(heard), "rank 0 failed: why");
  EXPECT_EQ(failure_to_tell("[comm.broadcast] rank 1 (pid 77) is gone, last seen in backward of step 3; this is rank 0 of 3"),
            "rank 1 (pid 77) is gone, last seen in backward of step 3");
  EXPECT_EQ(failure_to_tell("[comm.broadcast] rank 1 left the group after ValueError: x; this is rank 0 of 3 in step 0"),
            "rank 1 left the group after ValueError: x");
}

TEST(FailureText, HoweverOftenItIsHandedOnItSaysTheSame) {
  std::string told = failure_to_tell("KeyboardInterrupt in [comm.barrier]");
  for (int rank = 0; rank < 5; ++rank) {
    const std::string error = "[comm.barrier] " + failure_told_by(rank, told, 7) + "; this is rank 7 of 9 in step 2";
    EXPECT_EQ(error, "[comm.barrier] rank 0 failed: KeyboardInterrupt in [comm.barrier]; this is rank 7 of 9 in step 2");
    told = failure_to_tell(error);
  }
  EXPECT_TRUE(is_handed_on(told));
}

TEST(FailureText, ARankThatIsSaidToHaveEndedHearsWhoSaysSo) {
  EXPECT_EQ(failure_told_by(2, "rank 1 is gone", 1), "rank 2 failed: rank 1 is gone");
  EXPECT_EQ(failure_told_by(2, "rank 1 is gone", 0), "rank 1 is gone");
}

TEST(FailureText, TheRankThatItBeganWithCanBeRenumbered) {
  EXPECT_EQ(with_origin_called("rank 3 (pid 5) failed: rank 3's why", [](int rank) { return rank + 10; }),
            "rank 13 (pid 5) failed: rank 3's why");
  EXPECT_EQ(with_origin_called("no rank's", [](int rank) { return rank + 10; }), "no rank's");
}

}  // namespace
}  // namespace unshard::comm
