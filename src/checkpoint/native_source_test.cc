#include "checkpoint/native_source.h"

#include <ATen/ATen.h>

#include <random>

#include "checkpoint/testing.h"
#include "core/soak.h"

namespace unshard::checkpoint::testing {
namespace {

namespace fs = std::filesystem;
using unshard::testing::soak;

TEST(NativeSource, ReadsAnyRangeWhateverRanksWroteIt) {
  Folder folder;
  for (const int world : {1, 2, 3, 4, 7}) {
    write_sample(folder / "tag", world);
    NativeSource source(folder / "tag");
    EXPECT_EQ(source.contents().world_size, world);
    EXPECT_EQ(source.contents().parameters[0].value_kind(), kFp32);
    EXPECT_EQ(source.contents().parameters[1].value_kind(), kParam);
    for (std::int64_t begin = 0; begin <= 10; ++begin) {
      for (std::int64_t end = begin; end <= 10; ++end) {
        EXPECT_TRUE(at::equal(source.read({kFp32, "w", begin, end}), counted(end - begin, static_cast<double>(begin))));
        auto out = at::zeros({end - begin}, at::kBFloat16);
        source.read_into({"exp_avg", "w", begin, end}, out);
        EXPECT_TRUE(at::equal(out, counted(end - begin, 100 + static_cast<double>(begin)).to(at::kBFloat16)));
      }
    }
    EXPECT_THROW(source.read({"exp_avg", "b", 0, 3}), CheckpointError);
    verify(folder / "tag");
    for (int part = 0; part < 3; ++part) source.verify(part, 3, true);
  }
}

TEST(NativeSource, NamesTheFileAndTheReason) {
  Folder folder;
  EXPECT_NE(error_of([&] { NativeSource{folder / "nowhere"}; }).find("not a checkpoint"), std::string::npos);
  const auto damaged = [&](const std::function<void(const std::string&)>& damage) {
    write_sample(folder / "tag", 2);
    damage(folder / "tag/");
    return error_of([&] { verify(folder / "tag"); });
  };
  const auto has = [](const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; };
  auto text = damaged([](const std::string& in) { fs::remove(in + "rank_1.safetensors"); });
  EXPECT_TRUE(has(text, "rank_1.safetensors") && has(text, "No such file")) << text;
  text = damaged([](const std::string& in) { fs::resize_file(in + "rank_1.safetensors", fs::file_size(in + "rank_1.safetensors") - 1); });
  EXPECT_TRUE(has(text, "rank_1.safetensors") && has(text, "cut short")) << text;
  text = damaged([](const std::string& in) {
    auto bytes = contents_of(in + "rank_0.safetensors");
    bytes.back() = static_cast<char>(bytes.back() ^ 1);
    put(in + "rank_0.safetensors", bytes);
  });
  EXPECT_TRUE(has(text, "rank_0.safetensors") && has(text, "checksum")) << text;
  text = damaged([](const std::string& in) { put(in + "manifest.json", R"({"format": 3})"); });
  EXPECT_TRUE(has(text, "format 3") && has(text, "later")) << text;
  text = damaged([](const std::string& in) { put(in + "manifest.json", "\x80\x02}q"); });
  EXPECT_TRUE(has(text, "manifest.json")) << text;
  text = damaged([](const std::string& in) {  // files of two saves
    write_sample(in + "other", 4);
    fs::copy_file(in + "other/rank_0.safetensors", in + "rank_0.safetensors", fs::copy_options::overwrite_existing);
  });
  EXPECT_TRUE(has(text, "rank_0.safetensors") && has(text, "the manifest says")) << text;
}

// Each byte of the values is one part's to compare, however many parts there are.
TEST(NativeSource, ADamagedByteAnywhereIsFoundByExactlyOnePart) {
  Folder folder;
  write_sample(folder / "tag", 2);
  for (const char* name : {"/rank_0.safetensors", "/rank_1.safetensors"}) {
    const auto path = folder / "tag" + name;
    const auto whole = contents_of(path);
    const TensorFile file(path);
    std::int64_t first = INT64_MAX;
    for (const auto& [key, entry] : file.entries()) first = std::min(first, entry.begin);
    for (auto at = static_cast<std::size_t>(first); at < whole.size(); ++at) {
      auto damaged = whole;
      damaged[at] = static_cast<char>(damaged[at] ^ 0x10);
      put(path, damaged);
      for (const int parts : {1, 2, 3, 16}) {
        int found = 0;
        for (int part = 0; part < parts; ++part) {
          NativeSource source(folder / "tag");
          const auto error = error_of([&] { source.verify(part, parts, true); });
          if (error.empty()) continue;
          ++found;
          EXPECT_NE(error.find(path), std::string::npos) << error;
        }
        EXPECT_EQ(found, 1) << "byte " << at << " of " << path << " in " << parts << " parts";
      }
    }
    put(path, whole);
  }
}

nlohmann::json& any_node(nlohmann::json& root, std::mt19937& random) {
  auto* node = &root;
  while (node->is_structured() && !node->empty() && random() % 4 != 0) {
    auto at = node->begin();
    std::advance(at, static_cast<std::ptrdiff_t>(random() % node->size()));
    node = &*at;
  }
  return *node;
}

// Manifests with any value replaced, removed or doubled, and with any bytes changed: refused by name, or read, never anything else.
TEST(NativeSource, ADamagedManifestIsOnlyEverACheckpointError) {
  Folder folder;
  write_sample(folder / "tag", 2);
  const auto text = contents_of(folder / "tag/manifest.json");
  const nlohmann::json replacements[] = {nullptr,
                                         -1,
                                         0,
                                         1e300,
                                         "x",
                                         "../../etc/passwd",
                                         nlohmann::json::array(),
                                         nlohmann::json::object(),
                                         true,
                                         INT64_MAX,
                                         18446744073709551615ULL,
                                         nlohmann::json::array({INT64_MAX, INT64_MAX})};
  std::mt19937 random(11);
  int refused = 0;
  for (int round = 0; round < 1000 * soak(); ++round) {
    auto damaged = text;
    if (round % 2 == 0) {
      auto json = nlohmann::json::parse(text);
      any_node(json, random) = replacements[random() % std::size(replacements)];
      damaged = json.dump();
    } else {
      for (unsigned hits = 1 + random() % 3; hits > 0; --hits) damaged[random() % damaged.size()] = static_cast<char>(random());
    }
    put(folder / "tag/manifest.json", damaged);
    const auto error = error_of([&] { verify(folder / "tag"); });
    if (!error.empty()) ++refused;
  }
  EXPECT_GT(refused, 500 * soak());
}

}  // namespace
}  // namespace unshard::checkpoint::testing
