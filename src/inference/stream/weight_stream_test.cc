// Residency, prefetch order and the file of packed weights, on matrices of known values.
#include "inference/stream/weight_stream.h"

#include <gmock/gmock.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <random>

#include "inference/stream/checksum.h"
#include "inference/stream/weight_file.h"
#include "offload/transfers.h"
#include "unshard/inference/engine.h"

namespace unshard::inference {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class Folder {
 public:
  Folder() {
    if (!::mkdtemp(path_.data())) throw std::runtime_error("mkdtemp");
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_ = "/tmp/unshard_stream_XXXXXX";
};

/// Units of two matrices each, all values of unit i in [i, i + 1).
struct Model {
  explicit Model(int count) {
    Workers workers(1, false);
    for (int i = 0; i < count; ++i) {
      units.emplace_back();
      values.emplace_back();
      for (const std::int64_t rows : {40, 100}) {
        std::vector<float> numbers(static_cast<std::size_t>(rows * kCols));
        std::mt19937 random(static_cast<unsigned>(i * 1000 + rows));
        for (auto& number : numbers) number = static_cast<float>(i) + static_cast<float>(random() % 1000) / 1000;
        const WeightView view{FileType::f32, numbers.data(), rows, kCols, "w"};
        const Matrix packed = Matrix::pack(std::array{view}, WeightType::f32, workers);
        matrices.push_back(Matrix::describe(std::array{view}, WeightType::f32, false));
        const auto offset = static_cast<std::size_t>(units.back().add(matrices.back().packed()));
        values.back().resize(static_cast<std::size_t>(units.back().bytes));
        std::copy_n(packed.packed().data.get(), packed.bytes(), values.back().data() + offset);
      }
    }
  }
  void write(const std::string& path, const std::string& key) {
    std::vector<StoredUnit> stored;
    for (const auto& unit : values) stored.push_back({0, checksum(unit.data(), unit.size())});
    std::ofstream file(path, std::ios::binary);
    file << header_of(key, units, stored);
    for (const auto& unit : values) file.write(reinterpret_cast<const char*>(unit.data()), static_cast<std::streamsize>(unit.size()));
  }
  std::vector<std::int64_t> bytes() const {
    std::vector<std::int64_t> all;
    for (const auto& unit : units) all.push_back(unit.bytes);
    return all;
  }
  /// Does unit i lie where its matrices look, with its values?
  void expect_there(std::int64_t i) const {
    for (const auto& [matrix, offset] : units[static_cast<std::size_t>(i)].places)
      ASSERT_EQ(
          std::memcmp(matrix->data.get(), values[static_cast<std::size_t>(i)].data() + offset, static_cast<std::size_t>(matrix->bytes)), 0)
          << "unit " << i;
  }

  static constexpr std::int64_t kCols = 33;
  std::vector<Unit> units;
  std::vector<std::vector<std::uint8_t>> values;
  std::deque<Matrix> matrices;
};

std::int64_t sum(const std::vector<std::int64_t>& values) { return std::accumulate(values.begin(), values.end(), std::int64_t{0}); }

TEST(Residency, FillsItsBudgetAndNeverExceedsIt) {
  std::mt19937 random(1);
  for (int round = 0; round < 500; ++round) {
    std::vector<std::int64_t> bytes(1 + random() % 60);
    for (auto& each : bytes) each = round % 2 ? 4096 * (1 + random() % 9) : 8192;
    const auto largest = std::ranges::max(bytes), total = sum(bytes);
    if (total == largest) continue;
    const auto budget = largest + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(total - largest));
    const auto plan = plan_residency(bytes, budget, "model");
    std::int64_t kept = 0, least = largest;
    for (std::size_t i = 0; i < bytes.size(); ++i) plan.stays[i] ? kept += bytes[i] : least = std::min(least, bytes[i]);
    const auto used = kept + plan.slots * plan.slot_bytes;
    ASSERT_LE(used, budget);
    ASSERT_LT(budget - used, least) << "room for another unit was left";
    ASSERT_EQ(plan.slots, std::min(kMostSlots, budget / largest));
  }
}

TEST(Residency, KeepsUnitsEvenlySpreadSoThatTheDiskNeverRests) {
  const auto plan = plan_residency(std::vector<std::int64_t>(60, 4096), (20 + kMostSlots) * 4096, "model");
  int run = 0;
  for (const bool stays : plan.stays) {
    run = stays ? run + 1 : 0;
    EXPECT_LE(run, 1);
  }
  EXPECT_EQ(std::ranges::count(plan.stays, true), 20);
}

TEST(Residency, ABudgetBelowTheLargestUnitNamesWhatIsNeeded) {
  try {
    plan_residency({4096, 12288}, 8192, "some/model");
    FAIL();
  } catch (const ModelError& error) {
    EXPECT_THAT(error.what(), testing::AllOf(HasSubstr("some/model"), HasSubstr("12288"), HasSubstr("8192"), HasSubstr("weight_memory")));
  }
}

// Passes of all units and of the first ones only, with every number of slots: the right values are there each time.
TEST(WeightStream, EachUnitIsThereWhenItIsUsedWhateverFits) {
  Folder folder;
  Model model(9);
  model.write(folder / "file", "key");
  std::mt19937 random(3);
  for (std::int64_t fits = 1; fits < 9; ++fits) {
    auto found = open_weight_file(folder / "file", "key", model.units);
    ASSERT_TRUE(found);
    const auto plan = plan_residency(model.bytes(), fits * model.units[0].bytes, "model");
    WeightStream stream(model.units, plan, std::move(found->file), found->units);
    ASSERT_THAT(stream.check(), IsEmpty());
    for (int pass = 0; pass < 20; ++pass) {
      const std::int64_t used = pass % 4 == 3 ? 1 + static_cast<std::int64_t>(random() % 9) : 9;
      stream.begin(used);
      for (std::int64_t i = 0; i < used; ++i) {
        stream.use(i);
        model.expect_there(i);
      }
      stream.end();
    }
  }
}

TEST(WeightStream, WholePassesReadEachStreamedUnitOnce) {
  Folder folder;
  Model model(12);
  model.write(folder / "file", "key");
  auto found = open_weight_file(folder / "file", "key", model.units);
  const auto plan = plan_residency(model.bytes(), 7 * model.units[0].bytes, "model");
  WeightStream stream(model.units, plan, std::move(found->file), found->units);
  stream.check();
  constexpr int kPasses = 10;
  for (int pass = 0; pass < kPasses; ++pass) {
    stream.begin(12);
    for (std::int64_t i = 0; i < 12; ++i) stream.use(i);
    stream.end();
  }
  const auto streamed = std::ranges::count(plan.stays, false);
  EXPECT_EQ(streamed, 12 - (7 - kMostSlots));
  EXPECT_EQ(stream.bytes_read(), kPasses * streamed * model.units[0].bytes);  // what check() left in the slots is used
  EXPECT_THAT(stream.describe(), testing::AllOf(HasSubstr("3 of 12 parts"), HasSubstr(folder / "file")));
}

/// Reads at once, and notes from where.
class NotingCarrier : public offload::Carrier {
 public:
  NotingCarrier(offload::Transfers& transfers, std::vector<std::int64_t>& offsets) : transfers_(transfers), offsets_(offsets) {}
  void wake() override {
    while (auto piece = transfers_.take()) {
      offsets_.push_back(piece->offset);
      const auto got = ::pread(piece->fd, piece->buffer, static_cast<std::size_t>(piece->bytes), piece->offset);
      transfers_.finish(std::move(*piece), got);
    }
  }
  std::string describe() const override { return "notes"; }

 private:
  offload::Transfers& transfers_;
  std::vector<std::int64_t>& offsets_;
};

TEST(WeightStream, WhileAUnitComputesTheNextOnesAreOnTheirWay) {
  Folder folder;
  Model model(10);
  model.write(folder / "file", "key");
  auto found = open_weight_file(folder / "file", "key", model.units);
  const auto places = found->units;
  std::vector<std::int64_t> offsets;
  auto impl = std::make_unique<offload::AsyncQueue::Impl>();
  impl->carrier = std::make_unique<NotingCarrier>(impl->transfers, offsets);
  const auto plan = plan_residency(model.bytes(), (kMostSlots + 3) * model.units[0].bytes, "model");
  WeightStream stream(model.units, plan, std::move(found->file), found->units, std::make_unique<offload::AsyncQueue>(std::move(impl)));
  ASSERT_THAT(stream.check(), IsEmpty());
  const auto streamed_from = [&](std::int64_t unit) {  // offsets of the slots' units, in order of use
    std::vector<std::int64_t> wanted;
    for (; static_cast<std::int64_t>(wanted.size()) < kMostSlots; ++unit)
      if (!plan.stays[static_cast<std::size_t>(unit % 10)]) wanted.push_back(places[static_cast<std::size_t>(unit % 10)].offset);
    return wanted;
  };
  for (int pass = 0; pass < 3; ++pass) {  // check() has read what stays in between: the order is seen from the second pass on
    stream.begin(10);
    for (std::int64_t i = 0; i < 10; ++i) {
      stream.use(i);
      const auto wanted = streamed_from(i);
      ASSERT_GE(offsets.size(), wanted.size());
      if (pass == 0) continue;
      EXPECT_THAT(std::vector(offsets.end() - kMostSlots, offsets.end()), testing::ElementsAreArray(wanted)) << "at unit " << i;
    }
    stream.end();
  }
}

TEST(WeightFile, AnotherKeyACutAndADamagedOneAreNotBelieved) {
  Folder folder;
  Model model(4);
  const auto path = folder / "file";
  const auto opens = [&](const std::string& key) { return open_weight_file(path, key, model.units).has_value(); };
  EXPECT_FALSE(opens("key"));
  model.write(path, "key");
  EXPECT_TRUE(opens("key"));
  EXPECT_FALSE(opens("other"));
  const auto size = static_cast<std::int64_t>(std::filesystem::file_size(path));
  for (const std::int64_t at : {std::int64_t{3}, std::int64_t{26}, std::int64_t{60}, std::int64_t{4000}}) {  // anywhere in the header
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(at);
    file.put('\x7f');
    file.close();
    EXPECT_FALSE(opens("key")) << "byte " << at;
    model.write(path, "key");
  }
  std::filesystem::resize_file(path, static_cast<std::uintmax_t>(size - 1));
  EXPECT_FALSE(opens("key"));
  model.write(path, "key");
  Model other(3);
  EXPECT_FALSE(open_weight_file(path, "key", other.units).has_value());
}

TEST(WeightFile, AFlippedBitInAUnitIsFoundInThatUnit) {
  Folder folder;
  Model model(6);
  model.write(folder / "file", "key");
  const auto before = model.units[0].bytes;
  std::fstream file(folder / "file", std::ios::in | std::ios::out | std::ios::binary);
  const auto at = header_bytes("key", 6) + 4 * before + before - 1;  // the last, unused byte of unit 4
  file.seekp(at);
  file.put('\x01');
  file.close();
  for (const std::int64_t fits : {1, 4}) {
    auto found = open_weight_file(folder / "file", "key", model.units);
    WeightStream stream(model.units, plan_residency(model.bytes(), fits * before, "model"), std::move(found->file), found->units);
    EXPECT_THAT(stream.check(), ElementsAre(4));
  }
}

TEST(WeightStream, AFileThatWasCutAfterItWasOpenedIsAnErrorThatNamesIt) {
  Folder folder;
  Model model(6);
  model.write(folder / "file", "key");
  auto found = open_weight_file(folder / "file", "key", model.units);
  WeightStream stream(model.units, plan_residency(model.bytes(), model.units[0].bytes, "model"), std::move(found->file), found->units);
  ASSERT_THAT(stream.check(), IsEmpty());
  std::filesystem::resize_file(folder / "file", 8192);
  stream.begin(6);
  try {
    for (std::int64_t i = 0; i < 6; ++i) stream.use(i);
    FAIL();
  } catch (const ModelError& error) {
    EXPECT_THAT(error.what(), testing::AllOf(HasSubstr("ends before"), HasSubstr(folder / "file")));
  }
}

TEST(Checksum, EveryFlippedBitAndEveryLengthChangesIt) {
  std::vector<std::uint8_t> bytes(100);
  std::mt19937 random(1);
  for (auto& byte : bytes) byte = static_cast<std::uint8_t>(random());
  const auto right = checksum(bytes.data(), bytes.size());
  for (std::size_t i = 0; i < bytes.size() * 8; ++i) {
    bytes[i / 8] ^= static_cast<std::uint8_t>(1 << i % 8);
    EXPECT_NE(checksum(bytes.data(), bytes.size()), right) << "bit " << i;
    bytes[i / 8] ^= static_cast<std::uint8_t>(1 << i % 8);
  }
  const std::vector<std::uint8_t> zeros(100);
  for (std::size_t n = 0; n < 100; ++n) EXPECT_NE(checksum(zeros.data(), n), checksum(zeros.data(), n + 1));
}

}  // namespace
}  // namespace unshard::inference
