// Ranks that are waited for at the start are named while there is still time to do something about it.
#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "comm/roll_call.h"
#include "unshard/core/error.h"

namespace unshard::comm {
namespace {

TEST(RollCallReport, WhoIsWaitedForIsSaidOnceLongBeforeTheTimeOut) {
  RollCallOptions options;
  options.timeout = std::chrono::duration<double>(2.5);
  options.report_after = std::chrono::duration<double>(0.6);
  ::testing::internal::CaptureStderr();
  std::string error;
  {
    RollCall roll(c10::make_intrusive<c10d::HashStore>(), 0, 3, options);
    try {
      roll.exchange("", "the meeting");
    } catch (const CommError& exception) {
      error = exception.what();
    }
  }
  const auto said = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(error.find("rank 1, rank 2 haven't come"), std::string::npos) << error;
  const std::string line = "no progress for 0.6 s, still waiting (until 2.5 s): rank 1, rank 2 haven't come";
  const auto at = said.find(line);
  EXPECT_NE(at, std::string::npos) << said;
  EXPECT_EQ(said.find(line, at + 1), std::string::npos) << "said twice: " << said;
}

TEST(RollCallReport, NothingIsSaidOfRanksThatCome) {
  RollCallOptions options;
  options.report_after = std::chrono::duration<double>(0.6);
  ::testing::internal::CaptureStderr();
  RollCall(c10::make_intrusive<c10d::HashStore>(), 0, 1, options).exchange("", "the meeting");
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
}

}  // namespace
}  // namespace unshard::comm
