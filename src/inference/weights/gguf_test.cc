#include "inference/weights/gguf.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "inference/weights/weights_testing.h"

namespace unshard::inference {
namespace {

using testing::bytes_of;
using ::testing::ElementsAre;
using testing::error_of;
using ::testing::HasSubstr;
using testing::TemporaryFolder;

template <class T>
std::string number(std::uint32_t kind, T value) {
  return bytes_of(kind) + bytes_of(value);
}
std::string text(const std::string& value) { return bytes_of(static_cast<std::uint64_t>(value.size())) + value; }

/// Builds a file piece by piece; wrong ones too.
struct Builder {
  std::uint32_t version = 3;
  std::string keys, tensors, data;
  std::uint64_t key_count = 0, tensor_count = 0;

  Builder& key(const std::string& name, const std::string& kind_and_value) {
    keys += text(name) + kind_and_value;
    ++key_count;
    return *this;
  }
  Builder& tensor(const std::string& name, const std::vector<std::uint64_t>& dims, std::uint32_t type, std::uint64_t offset) {
    tensors += text(name) + bytes_of(static_cast<std::uint32_t>(dims.size()));
    for (const auto dim : dims) tensors += bytes_of(dim);
    tensors += bytes_of(type) + bytes_of(offset);
    ++tensor_count;
    return *this;
  }
  std::string header() const { return "GGUF" + bytes_of(version) + bytes_of(tensor_count) + bytes_of(key_count) + keys + tensors; }
  std::string file(std::size_t alignment = 32) const {
    std::string all = header();
    all.resize((all.size() + alignment - 1) / alignment * alignment, '\0');
    return all + data;
  }
};

Builder small() {
  Builder builder;
  builder.key("general.architecture", bytes_of(8U) + text("llama"))
      .key("u8", number(0, std::uint8_t{200}))
      .key("i8", number(1, std::int8_t{-3}));
  builder.key("u16", number(2, std::uint16_t{65535})).key("i16", number(3, std::int16_t{-300})).key("u32", number(4, 4000000000U));
  builder.key("i32", number(5, -70000)).key("f32", number(6, 0.5F)).key("yes", number(7, std::uint8_t{1}));
  builder.key("u64", number(10, ~std::uint64_t{0})).key("i64", number(11, std::int64_t{-5})).key("f64", number(12, 1e300));
  builder.key("texts", bytes_of(9U) + bytes_of(8U) + bytes_of(std::uint64_t{2}) + text("a") + text("\xff\x80"));
  const std::string inner = bytes_of(0U) + bytes_of(std::uint64_t{2}) + "\x01\x02";
  builder.key("lists", bytes_of(9U) + bytes_of(9U) + bytes_of(std::uint64_t{2}) + inner + inner);
  builder.tensor("w", {3, 2}, 0, 0).tensor("q", {32, 2}, 8, 32).tensor("odd", {256}, 23, 128).tensor("b", {5}, 30, 160);
  for (int i = 1; i <= 6; ++i) builder.data += bytes_of(static_cast<float>(i));
  builder.data.resize(170, 'x');
  return builder;
}

TEST(Gguf, ReadsMetadataOfEveryKind) {
  const TemporaryFolder folder;
  for (const std::uint32_t version : {2U, 3U}) {
    Builder builder = small();
    builder.version = version;
    const GgufFile file(folder.write("m.gguf", builder.file()));
    EXPECT_EQ(file.text("general.architecture"), "llama");
    EXPECT_EQ(file.integer("u8"), 200);
    EXPECT_EQ(file.integer("i8"), -3);
    EXPECT_EQ(file.integer("u16"), 65535);
    EXPECT_EQ(file.integer("i16"), -300);
    EXPECT_EQ(file.integer("u32"), 4000000000);
    EXPECT_EQ(file.integer("i32"), -70000);
    EXPECT_EQ(file.number("f32"), 0.5);
    EXPECT_EQ(file.find_boolean("yes"), true);
    EXPECT_EQ(file.metadata()["u64"].get<std::uint64_t>(), ~std::uint64_t{0});
    EXPECT_EQ(file.integer("i64"), -5);
    EXPECT_EQ(file.number("f64"), 1e300);
    EXPECT_EQ(file.metadata()["texts"][1].get<std::string>(), "\xff\x80");
    EXPECT_EQ(file.metadata()["lists"][1][1].get<int>(), 2);
    EXPECT_EQ(file.find_integer("none"), std::nullopt);
  }
}

TEST(Gguf, AValueOfAnotherKindOrNoneIsAnErrorWithItsKey) {
  const TemporaryFolder folder;
  const GgufFile file(folder.write("m.gguf", small().file()));
  EXPECT_THAT(error_of([&] { file.integer("general.architecture"); }), HasSubstr("'general.architecture' is string, an integer is wanted"));
  EXPECT_THAT(error_of([&] { file.find_integer("u64"); }), HasSubstr("'u64' is number, an integer is wanted"));
  EXPECT_THAT(error_of([&] { file.find_text("f32"); }), HasSubstr("a text is wanted"));
  EXPECT_THAT(error_of([&] { file.find_boolean("u8"); }), HasSubstr("true or false is wanted"));
  EXPECT_THAT(error_of([&] { file.number("texts"); }), HasSubstr("a number is wanted"));
  EXPECT_THAT(error_of([&] { file.text("llama.none"); }), HasSubstr("has no 'llama.none'"));
}

TEST(Gguf, ReversesTheDimsAndFindsTheBytes) {
  const TemporaryFolder folder;
  const GgufFile file(folder.write("m.gguf", small().file()));
  EXPECT_THAT(file.names(), ElementsAre("b", "odd", "q", "w"));
  const WeightView w = file.get("w"), q = file.get("q");
  EXPECT_THAT(file.shape("w"), ElementsAre(2, 3));
  EXPECT_EQ(w.rows, 2);
  EXPECT_EQ(w.cols, 3);
  EXPECT_EQ(static_cast<const float*>(w.row(1))[0], 4);
  EXPECT_EQ(q.type, FileType::q8_0);
  EXPECT_EQ(static_cast<const char*>(q.data) - static_cast<const char*>(w.data), 32);
  EXPECT_EQ(file.get("b").type, FileType::bf16);
  EXPECT_THAT(error_of([&] { file.find("odd"); }), HasSubstr("'odd' is of type GGML 23"));
}

TEST(Gguf, UsesTheAlignmentThatTheFileNames) {
  const TemporaryFolder folder;
  Builder builder;
  builder.key("general.alignment", number(4, 256U)).tensor("w", {1}, 0, 256).data = std::string(256, 'x') + bytes_of(9.0F);
  const GgufFile file(folder.write("m.gguf", builder.file(256)));
  EXPECT_EQ(*static_cast<const float*>(file.get("w").data), 9);
}

TEST(Gguf, EachKindOfDamageIsSaid) {
  const std::uint64_t huge = ~std::uint64_t{0}, large = std::uint64_t{1} << 62;
  const auto with_key = [](const std::string& value) { return Builder().key("k", value).file(); };
  const auto with_tensor = [](const std::vector<std::uint64_t>& dims, std::uint32_t type, std::uint64_t offset) {
    Builder builder;
    builder.tensor("t", dims, type, offset).data = std::string(64, 'x');
    return builder.file();
  };
  Builder old, big, keys, tensors, overlap, twice, part;
  old.version = 1;
  big.version = 0x03000000;
  keys.key_count = huge;
  tensors.tensor_count = large;
  overlap.tensor("a", {16}, 0, 0).tensor("b", {8}, 0, 32).data = std::string(64, 'x');
  twice.tensor("a", {8}, 0, 0).tensor("a", {8}, 0, 32).data = std::string(64, 'x');
  part.key("split.count", number(2, std::uint16_t{2}));
  std::string deep;
  for (int i = 0; i < 100; ++i) deep += bytes_of(9U) + (i == 0 ? "" : bytes_of(std::uint64_t{1}));
  const std::pair<std::string, std::string> cases[] = {
      {"GGU", "ends within the magic number"},
      {"GGUX" + std::string(99, 'x'), "doesn't begin with"},
      {old.file(), "is GGUF version 1"},
      {big.file(), "big-endian"},
      {keys.file(), "as the number of keys"},
      {tensors.file(), "as the number of tensors"},
      {with_key(bytes_of(13U) + "12345678"), "'k' is of unknown kind 13"},
      {with_key(bytes_of(7U) + "\x02"), "neither true nor false but 2"},
      {with_key(bytes_of(8U) + bytes_of(huge)), "ends within a text"},
      {with_key(bytes_of(9U) + bytes_of(0U) + bytes_of(large)), "as a list's length"},
      {with_key(bytes_of(9U) + bytes_of(99U) + bytes_of(large)), "list of unknown kind 99"},
      {with_key(deep), "more than 4 deep"},
      {Builder().key("k", number(0, 'x')).key("k", number(0, 'x')).file(), "'k' comes twice"},
      {Builder().key("general.alignment", number(4, 0U)).file(), "general.alignment is 0"},
      {Builder().key("general.alignment", number(4, 24U)).file(), "general.alignment is 24"},
      {Builder().key("general.alignment", number(5, -32)).file(), "general.alignment is"},
      {Builder().key("general.alignment", bytes_of(8U) + text("32")).file(), "'general.alignment' is string"},
      {part.file(), "one part of several"},
      {with_tensor({1, 1, 1, 1, 1}, 0, 0), "has 5 dims"},
      {with_tensor({huge}, 0, 0), "has a size of"},
      {with_tensor({large, 4}, 0, 0), "more elements than any file"},
      {with_tensor({0, large, 4}, 0, 0), "more elements than any file"},
      {with_tensor({17}, 0, 0), "'t' wants 68 bytes at 0 of the data, which has 64"},
      {with_tensor({16}, 0, 32), "wants 64 bytes at 32"},
      {with_tensor({16}, 0, large), "wants 64 bytes at"},
      {with_tensor({8}, 0, 4), "no multiple of 32"},
      {with_tensor({33}, 8, 0), "'t' has rows of 33, no multiple of q8_0's 32"},
      {overlap.file(), "'a' and 'b' overlap"},
      {twice.file(), "'a' comes twice"},
  };
  const TemporaryFolder folder;
  for (const auto& [bytes, wanted] : cases) {
    const std::string path = folder.write("m.gguf", bytes);
    EXPECT_THAT(error_of([&] { GgufFile file(path); }), ::testing::AllOf(HasSubstr(wanted), HasSubstr(path)));
  }
}

TEST(Gguf, EveryTruncationIsRefused) {
  const TemporaryFolder folder;
  const std::string whole = small().file();
  for (std::size_t size = 1; size < whole.size(); ++size) {
    const std::string path = folder.write("m.gguf", whole.substr(0, size));
    EXPECT_THAT(error_of([&] { GgufFile file(path); }), HasSubstr(path)) << size;
  }
}

TEST(Gguf, DamageByChanceGivesAnErrorOrAValidFile) {
  const TemporaryFolder folder;
  const Builder builder = small();
  const std::string whole = builder.file();
  std::mt19937 random(2);
  int refused = 0;
  for (int round = 0; round < 500; ++round) {
    const std::string path = folder.write("m.gguf", testing::damage(whole, builder.header().size(), random));
    refused += error_of([&] {
                 const GgufFile file(path);
                 testing::read_all(file, file.file().bytes());
               }).empty()
                   ? 0
                   : 1;
  }
  EXPECT_GT(refused, 200);
}

TEST(OpenWeights, KnowsAGgufFileByItsFirstBytes) {
  const TemporaryFolder folder;
  EXPECT_EQ(open_weights(folder.write("any-name", small().file()))->get("w").rows, 2);
  EXPECT_THAT(error_of([&] { open_weights(folder.write("x.gguf", "not a model at all")); }), HasSubstr("not safetensors"));
}

}  // namespace
}  // namespace unshard::inference
