#include "inference/weights/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "inference/weights/weights_testing.h"

namespace unshard::inference {
namespace {

using testing::bytes_of;
using ::testing::ElementsAre;
using testing::error_of;
using ::testing::HasSubstr;
using testing::TemporaryFolder;

std::string file_of(const std::string& header, const std::string& data) {
  return bytes_of(static_cast<std::uint64_t>(header.size())) + header + data;
}

/// a: F32 [2, 3] 1..6; b: BF16 [4]; c: I64 [1]; d: F32 [2, 1, 2]; e: F16 scalar. The data begins at a multiple of 8.
std::string small_file() {
  std::string header =
      R"({"__metadata__":{"format":"pt"},)"
      R"("a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"b":{"dtype":"BF16","shape":[4],"data_offsets":[24,32]},)"
      R"("c":{"dtype":"I64","shape":[1],"data_offsets":[32,40]},"d":{"dtype":"F32","shape":[2,1,2],"data_offsets":[40,56]},)"
      R"("e":{"dtype":"F16","shape":[],"data_offsets":[56,58]}})";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  std::string data;
  for (int i = 1; i <= 6; ++i) data += bytes_of(static_cast<float>(i));
  data.resize(58, 'x');
  return file_of(header, data);
}

std::string one_tensor(const std::string& fields, std::size_t data) {
  return file_of(R"({"w":{)" + fields + "}}", std::string(data, '\0'));
}

TEST(Safetensors, GivesEveryTensorWhereItLies) {
  const TemporaryFolder folder;
  const SafetensorsFile file(folder.write("m.safetensors", small_file()));
  EXPECT_THAT(file.names(), ElementsAre("a", "b", "c", "d", "e"));
  const WeightView a = file.get("a");
  EXPECT_EQ(a.rows, 2);
  EXPECT_EQ(a.cols, 3);
  EXPECT_EQ(a.type, FileType::f32);
  EXPECT_EQ(static_cast<const float*>(a.row(1))[2], 6);
  EXPECT_EQ(file.find("b")->type, FileType::bf16);
  EXPECT_EQ(file.find("b")->rows, 1);
  EXPECT_EQ(file.find("b")->cols, 4);
  EXPECT_EQ(file.find("d")->rows, 2);
  EXPECT_EQ(file.find("d")->cols, 2);
  EXPECT_THAT(file.shape("d"), ElementsAre(2, 1, 2));
  EXPECT_EQ(file.find("e")->cols, 1);
  EXPECT_EQ(file.find("none"), nullptr);
}

TEST(Safetensors, OtherTypesAreAnErrorOnlyWhenAskedFor) {
  const TemporaryFolder folder;
  const SafetensorsFile file(folder.write("m.safetensors", small_file()));
  EXPECT_THAT(file.shape("c"), ElementsAre(1));
  const std::string error = error_of([&] { file.find("c"); });
  EXPECT_THAT(error, HasSubstr("'c' is of type I64"));
  EXPECT_THAT(error, HasSubstr("m.safetensors"));
}

TEST(Safetensors, AMissingTensorIsNamedWithItsFile) {
  const TemporaryFolder folder;
  const SafetensorsFile file(folder.write("m.safetensors", small_file()));
  const std::string error = error_of([&] { file.get("lm_head.weight"); });
  EXPECT_THAT(error, HasSubstr("'lm_head.weight'"));
  EXPECT_THAT(error, HasSubstr("m.safetensors"));
}

TEST(Safetensors, FloatsAtOddAddressesAreMovedToEvenOnes) {
  const TemporaryFolder folder;
  std::string header = R"({"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})";
  while ((8 + header.size()) % 4 != 1) header += ' ';
  const SafetensorsFile file(folder.write("m.safetensors", file_of(header, bytes_of(2.5F))));
  const void* data = file.get("w").data;
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(data) % 4, 0U);
  EXPECT_EQ(*static_cast<const float*>(data), 2.5F);
}

TEST(Safetensors, EachKindOfDamageIsSaid) {
  const std::pair<std::string, std::string> cases[] = {
      {"1234567", "too short"},
      {bytes_of(std::uint64_t{100}) + "{}", "says its header has 100 bytes"},
      {bytes_of(~std::uint64_t{0}) + "{}", "says its header has"},
      {file_of("{\"a\":", ""), "header is damaged"},
      {file_of("[1]", ""), "not an object"},
      {file_of(R"({"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", "abcd"),
       "twice"},
      {file_of(R"({"w":3})", ""), "'w' has no dtype"},
      {one_tensor(R"("dtype":"F32","shape":[1])", 4), "no list 'data_offsets'"},
      {one_tensor(R"("dtype":"F32","data_offsets":[0,4])", 4), "no list 'shape'"},
      {one_tensor(R"("dtype":"F32","shape":[-1],"data_offsets":[0,4])", 4), "other than sizes"},
      {one_tensor(R"("dtype":"F32","shape":[1.0],"data_offsets":[0,4])", 4), "other than sizes"},
      {one_tensor(R"("dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,4])", 4), "other than sizes"},
      {one_tensor(R"("dtype":"F32","shape":[1],"data_offsets":[4,0])", 4), "wrong data_offsets"},
      {one_tensor(R"("dtype":"F32","shape":[1],"data_offsets":[0,4,8])", 4), "wrong data_offsets"},
      {one_tensor(R"("dtype":"F32","shape":[2],"data_offsets":[0,8])", 4), "ends at byte 8 of the data, the file has 4"},
      {one_tensor(R"("dtype":"F32","shape":[2],"data_offsets":[0,4])", 4), "has 4 bytes, its shape and type want 8"},
      {one_tensor(R"("dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,4])", 4), "its shape and type want"},
      {one_tensor(R"("dtype":"F32","shape":[0,4611686018427387904,4],"data_offsets":[0,0])", 0), "its shape and type want"},
      {one_tensor(R"("dtype":"F32","shape":[1],"data_offsets":[0,4])", 9), "take 4 bytes, the file has 9"},
      {one_tensor(R"("dtype":"F32","shape":[1],"data_offsets":[4,8])", 8), "begins at byte 4 of the data, the one before it ends at 0"},
      {file_of(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
               "12345678"),
       "begins at byte 4 of the data, the one before it ends at 8"},
  };
  const TemporaryFolder folder;
  for (const auto& [bytes, wanted] : cases) {
    const std::string path = folder.write("m.safetensors", bytes);
    EXPECT_THAT(error_of([&] { SafetensorsFile file(path); }), ::testing::AllOf(HasSubstr(wanted), HasSubstr(path)));
  }
}

TEST(Safetensors, WhatIsNoFileIsSaid) {
  const TemporaryFolder folder;
  EXPECT_THAT(error_of([&] { SafetensorsFile file(folder.path() + "/none"); }), HasSubstr("No such file"));
  EXPECT_THAT(error_of([&] { SafetensorsFile file(folder.path()); }), HasSubstr("not a plain file"));
  EXPECT_THAT(error_of([&] { SafetensorsFile file(folder.write("m", "")); }), HasSubstr("is empty"));
}

TEST(Safetensors, DamageByChanceGivesAnErrorOrAValidFile) {
  const TemporaryFolder folder;
  const std::string whole = small_file();
  std::mt19937 random(1);
  int refused = 0;
  for (int round = 0; round < 500; ++round) {
    const std::string path = folder.write("m.safetensors", testing::damage(whole, whole.size() - 58, random));
    refused += error_of([&] {
                 const SafetensorsFile file(path);
                 testing::read_all(file, file.file().bytes());
               }).empty()
                   ? 0
                   : 1;
  }
  EXPECT_GT(refused, 300);
}

TEST(SafetensorsFolder, ReadsOneFileOrAllThatTheIndexNames) {
  const TemporaryFolder folder;
  folder.write("x-1.safetensors", small_file());
  folder.write("x-2.safetensors", file_of(R"({"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", bytes_of(7.0F)));
  folder.write("model.safetensors.index.json", R"({"metadata":{},"weight_map":{"a":"x-1.safetensors","w":"x-2.safetensors"}})");
  const auto source = open_weights(folder.path());
  EXPECT_THAT(source->names(), ElementsAre("a", "w"));
  EXPECT_EQ(*static_cast<const float*>(source->get("w").data), 7);
  EXPECT_EQ(source->get("a").rows, 2);
  folder.write("model.safetensors", small_file());
  EXPECT_THAT(open_weights(folder.path())->names(), ElementsAre("a", "b", "c", "d", "e"));
}

TEST(SafetensorsFolder, SaysWhatTheIndexPromisesAndTheFolderLacks) {
  const TemporaryFolder folder;
  EXPECT_THAT(error_of([&] { open_weights(folder.path()); }), HasSubstr("neither model.safetensors nor"));
  folder.write("x.safetensors", small_file());
  const std::pair<const char*, const char*> cases[] = {
      {R"({"weight_map":{"a":"y.safetensors"}})", "y.safetensors: can't be opened"},
      {R"({"weight_map":{"z":"x.safetensors"}})", "x.safetensors: has no tensor 'z'"},
      {R"({"weight_map":{"a":"../x.safetensors"}})", "no file name of this folder"},
      {R"({"weight_map":{"a":".."}})", "no file name of this folder"},
      {R"({"weight_map":{"a":1}})", "no file name of this folder"},
      {R"({"weight_map":[]})", "no object 'weight_map'"},
      {R"({})", "no object 'weight_map'"},
      {R"({)", "the index is damaged"},
  };
  for (const auto& [index, wanted] : cases) {
    folder.write("model.safetensors.index.json", index);
    EXPECT_THAT(error_of([&] { open_weights(folder.path()); }), HasSubstr(wanted));
  }
}

}  // namespace
}  // namespace unshard::inference
