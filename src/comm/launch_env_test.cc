#include "comm/launch_env.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

namespace unshard::comm {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Env = std::map<std::string, std::string>;

LaunchEnv read(const Env& env) {
  return read_launch_env([&](const char* name) {
    const auto found = env.find(name);
    return found == env.end() ? std::nullopt : std::optional(found->second);
  });
}

std::string mistake(const Env& env) {
  try {
    read(env);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return {};
}

const Env kMaster{{"MASTER_ADDR", "10.0.0.1"}, {"MASTER_PORT", "29500"}};

Env with_master(Env env) {
  env.insert(kMaster.begin(), kMaster.end());
  return env;
}

TEST(LaunchEnv, NothingSetIsAWorldOfOne) {
  EXPECT_EQ(read({}).world_size, 1);
  EXPECT_EQ(read({}).rank, 0);
}

TEST(LaunchEnv, LaunchersNamesAreUnderstood) {
  for (const auto& [rank, size] : std::map<std::string, std::string>{{"RANK", "WORLD_SIZE"},
                                                                     {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},
                                                                     {"PMI_RANK", "PMI_SIZE"},
                                                                     {"SLURM_PROCID", "SLURM_NTASKS"}}) {
    const auto env = read(with_master({{rank, "2"}, {size, "4"}}));
    EXPECT_EQ(env.rank, 2) << rank;
    EXPECT_EQ(env.world_size, 4) << size;
    EXPECT_EQ(env.address, "10.0.0.1");
    EXPECT_EQ(env.port, 29500);
    EXPECT_FALSE(env.store_exists);
  }
}

TEST(LaunchEnv, RankComesBeforeTheOtherNames) {
  EXPECT_EQ(read(with_master({{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "1"}})).rank, 1);
}

TEST(LaunchEnv, TorchrunsAgentServesTheStore) {
  const auto env = read(
      with_master({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"TORCHELASTIC_USE_AGENT_STORE", "True"}, {"TORCHELASTIC_RESTART_COUNT", "3"}}));
  EXPECT_TRUE(env.store_exists);
  EXPECT_THAT(env.store_prefix, HasSubstr("3"));
}

TEST(LaunchEnv, MistakesNameTheVariable) {
  EXPECT_THAT(mistake({{"RANK", "0"}}), HasSubstr("WORLD_SIZE"));
  EXPECT_THAT(mistake({{"WORLD_SIZE", "2"}}), HasSubstr("RANK"));
  EXPECT_THAT(mistake({{"RANK", "0"}, {"WORLD_SIZE", "2"}}), HasSubstr("MASTER_ADDR"));
  EXPECT_THAT(mistake({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "a"}}), HasSubstr("MASTER_PORT"));
  EXPECT_THAT(mistake(with_master({{"RANK", "x1"}, {"WORLD_SIZE", "2"}})), AllOf(HasSubstr("RANK"), HasSubstr("x1")));
  EXPECT_THAT(mistake(with_master({{"RANK", "2"}, {"WORLD_SIZE", "2"}})), HasSubstr("RANK=2"));
  EXPECT_THAT(mistake({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "a"}, {"MASTER_PORT", "99999"}}), HasSubstr("99999"));
}

}  // namespace
}  // namespace unshard::comm
