#include "checkpoint/tensor_file.h"

#include <ATen/ATen.h>

#include <random>

#include "checkpoint/checksum_reader.h"
#include "checkpoint/testing.h"
#include "core/soak.h"

namespace unshard::checkpoint::testing {
namespace {

namespace fs = std::filesystem;
using unshard::testing::soak;

TEST(TensorFile, ReadsWhatItWrote) {
  Folder folder;
  const NamedTensors tensors{{"a", counted(12).view({3, 4})},     {"transposed", counted(6).view({2, 3}).t()},
                             {"half", counted(5).to(at::kHalf)},  {"none", at::empty({0})},
                             {"scalar", at::ones({}, at::kLong)}, {"yes", at::ones({3}, at::kBool)}};
  const auto written = write_tensor_file(folder / "t", tensors, {{"key", "value"}});
  const TensorFile file(folder / "t");
  EXPECT_EQ(written.bytes, static_cast<std::int64_t>(fs::file_size(folder / "t")));
  EXPECT_EQ(file.metadata().at("key"), "value");
  EXPECT_EQ(file.entries().size(), tensors.size());
  for (const auto& [name, tensor] : tensors) {
    const auto read = file.read(name);
    EXPECT_EQ(read.scalar_type(), tensor.scalar_type());
    EXPECT_TRUE(at::equal(read, tensor)) << name;
    EXPECT_EQ(ChecksumReader(folder / "t").checksum(file.entry(name).begin, file.entry(name).end), written.parts.at(name)) << name;
  }
  EXPECT_EQ(file.entry("a").begin % 4096, 0);
  auto middle = at::empty({5});
  file.read_elements("a", 4, 9, middle.data_ptr());
  EXPECT_TRUE(at::equal(middle, counted(5, 4)));
  EXPECT_THROW(file.read("b"), CheckpointError);
}

TEST(TensorFile, EveryPrefixOfAFileIsRefused) {
  Folder folder;
  write_tensor_file(folder / "t", {{"a", counted(6)}}, {});
  const auto bytes = contents_of(folder / "t");
  for (std::size_t cut = 0; cut < bytes.size(); cut += cut < 200 || cut + 50 > bytes.size() ? 1 : 97) {
    put(folder / "cut", bytes.substr(0, cut));
    EXPECT_THROW(TensorFile{folder / "cut"}, CheckpointError) << cut;
  }
}

// Damage of any kind is a CheckpointError or goes unseen by the header's reader (the checksums see it); nothing else, and no crash.
TEST(TensorFile, ADamagedHeaderIsOnlyEverACheckpointError) {
  Folder folder;
  write_tensor_file(folder / "t", {{"a", counted(6)}, {"b", counted(3).to(at::kBFloat16)}}, {{"key", "value"}});
  const auto bytes = contents_of(folder / "t");
  const auto header_end = bytes.find("  ");
  std::mt19937 random(3);
  int refused = 0;
  for (int round = 0; round < 500 * soak(); ++round) {
    auto damaged = bytes;
    for (unsigned hits = 1 + random() % 3; hits > 0; --hits) {
      const auto at = random() % header_end;
      switch (random() % 4) {
        case 0:
          damaged[at] = static_cast<char>(random());
          break;
        case 1:
          damaged[at] = "{}[],:\"-9e"[random() % 10];
          break;
        case 2:
          damaged.erase(at, 1 + random() % 8);
          break;
        default:
          damaged.insert(at, std::string(1 + random() % 3, "0123456789[{-"[random() % 13]));
      }
    }
    put(folder / "d", damaged);
    try {
      const TensorFile file(folder / "d");
      for (const auto& [name, entry] : file.entries()) file.read(name);
    } catch (const CheckpointError& error) {
      ++refused;
      EXPECT_NE(std::string(error.what()).find(folder / "d"), std::string::npos) << error.what();
    }
  }
  EXPECT_GT(refused, 250 * soak());
}

}  // namespace
}  // namespace unshard::checkpoint::testing
