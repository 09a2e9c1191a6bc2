#include "agreement.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "flat.h"
#include "unshard/comm/communicator.h"
#include "unshard/comm/host_group.h"
#include "unshard/core/error.h"

namespace unshard {
namespace {

std::uint64_t fnv1a(const std::vector<std::string>& lines) {
  std::uint64_t hash = 14695981039346656037ULL;
  const auto add = [&hash](unsigned char byte) { hash = (hash ^ byte) * 1099511628211ULL; };
  for (const auto& line : lines) {
    for (const char c : line) add(static_cast<unsigned char>(c));
    add('\n');
  }
  return hash;
}

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> lines;
  for (std::size_t begin = 0; begin < text.size();) {
    const auto end = std::min(text.find('\n', begin), text.size());
    lines.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return lines;
}

// Of a setting, "key = value"; empty: the line is something else.
std::string_view key_of(std::string_view line) {
  const auto end = line.find(" = ");
  return end == std::string_view::npos ? std::string_view{} : line.substr(0, end);
}

// The first line in which `mine` and `theirs` differ, as both have it; a setting that one of them lacks is named.
std::optional<std::pair<std::string, std::string>> first_difference(const std::vector<std::string>& mine,
                                                                    const std::vector<std::string>& theirs) {
  const auto [at, other] = std::mismatch(mine.begin(), mine.end(), theirs.begin(), theirs.end());
  const auto has = [](const auto& lines, std::string_view key) {
    return std::any_of(lines.begin(), lines.end(), [&](const auto& line) { return key_of(line) == key; });
  };
  const std::string a = at == mine.end() ? "" : *at, b = other == theirs.end() ? "" : *other;
  if (a == b) return std::nullopt;
  if (!key_of(a).empty() && !has(theirs, key_of(a))) return std::pair{a, cat("no ", key_of(a))};
  if (!key_of(b).empty() && !has(mine, key_of(b))) return std::pair{cat("no ", key_of(b)), b};
  return std::pair{a.empty() ? "nothing" : a, b.empty() ? "nothing" : b};
}

struct Header {
  double squares;
  std::int32_t bad_parameter, bad_rank, bad_loss, unused;
};

}  // namespace

std::vector<std::byte> exchange_bytes(Communicator& comm, const void* mine, std::size_t bytes, std::string_view where) {
  const auto world = static_cast<std::size_t>(comm.world_size());
  std::vector<std::byte> all(world * bytes);
  if (world == 1) {
    std::memcpy(all.data(), mine, bytes);
  } else if (auto* host = comm.host()) {
    const auto sequence = comm.recorder().begin("exchange", where, static_cast<std::int64_t>(bytes), comm.step());
    std::vector<std::byte> chunk(world * HostGroup::kSmallBytes);
    for (std::size_t begin = 0; begin < bytes; begin += HostGroup::kSmallBytes) {
      const auto size = std::min(HostGroup::kSmallBytes, bytes - begin);
      host->all_gather_small(static_cast<const std::byte*>(mine) + begin, size, chunk.data(), where);
      for (std::size_t r = 0; r < world; ++r) std::memcpy(all.data() + r * bytes + begin, chunk.data() + r * size, size);
    }
    comm.recorder().end(sequence);
  } else {
    auto input = flat::empty(static_cast<std::int64_t>(bytes), c10::kByte, c10::kCPU);
    auto output = flat::empty(static_cast<std::int64_t>(world * bytes), c10::kByte, c10::kCPU);
    std::memcpy(input.data_ptr(), mine, bytes);
    comm.all_gather(output, input, where);
    std::memcpy(all.data(), output.data_ptr(), all.size());
  }
  return all;
}

void sum_over_ranks(Communicator& comm, std::vector<double>& values, std::string_view where) {
  const auto all = exchange_bytes(comm, values.data(), values.size() * sizeof(double), where);
  std::fill(values.begin(), values.end(), 0.0);
  for (std::size_t at = 0; at < all.size(); at += sizeof(double)) {
    double value;
    std::memcpy(&value, all.data() + at, sizeof(double));
    values[at / sizeof(double) % values.size()] += value;
  }
}

std::string agree_on_error(Communicator& comm, const std::string& error, std::string_view where) {
  const std::uint8_t failed = !error.empty();
  const auto all = exchange_bytes(comm, &failed, 1, where);
  if (std::all_of(all.begin(), all.end(), [](std::byte flag) { return flag == std::byte{0}; })) return {};
  const auto errors = comm.world_size() == 1 ? std::vector{error} : comm.all_gather_strings(error);
  if (failed) return error;
  for (std::size_t r = 0; r < errors.size(); ++r) {
    if (!errors[r].empty()) return cat("[", where, "] rank ", r, " failed: ", errors[r]);
  }
  return {};
}

void agree_no_error(Communicator& comm, const std::string& error, std::string_view where) {
  const auto agreed = agree_on_error(comm, error, where);
  if (agreed.empty()) return;
  if (!error.empty()) throw std::invalid_argument(agreed);
  throw CommError(agreed);
}

void agree_same_lines(Communicator& comm, const std::vector<std::string>& lines, std::string_view where, std::string_view advice) {
  const std::uint64_t hash = fnv1a(lines);
  const auto all = exchange_bytes(comm, &hash, sizeof(hash), where);
  const int world = comm.world_size();
  bool same = true;
  for (int r = 0; r < world; ++r) same = same && std::memcmp(all.data() + r * sizeof(hash), &hash, sizeof(hash)) == 0;
  if (same) return;
  std::string text;
  for (const auto& line : lines) (text += line) += '\n';
  const auto texts = comm.all_gather_strings(text);
  const auto first = split(texts[0]);
  for (int r = 1; r < world; ++r) {
    if (const auto differ = first_difference(first, split(texts[r])))
      throw CommError(cat("[", where, "] ranks differ: rank 0 has ", differ->first, ", rank ", r, " has ", differ->second, "; ", advice));
  }
}

AgreedFacts agree_on_gradients(Communicator& comm, const GradientFacts& mine, const std::vector<std::uint8_t>& present) {
  const std::size_t bits = (present.size() + 7) / 8, row = sizeof(Header) + bits;
  std::vector<std::byte> message(row);
  const Header header{mine.squares, mine.bad_parameter, mine.bad_rank, mine.bad_loss, 0};
  std::memcpy(message.data(), &header, sizeof(header));
  for (std::size_t p = 0; p < present.size(); ++p) {
    if (present[p]) message[sizeof(header) + p / 8] |= std::byte{1} << (p % 8);
  }
  const auto all = exchange_bytes(comm, message.data(), row, "step: gradient norm");

  AgreedFacts agreed;
  agreed.present.assign(present.size(), 0);
  int bad_loss_rank = -1;
  for (int r = 0; r < comm.world_size(); ++r) {
    const auto* its = all.data() + static_cast<std::size_t>(r) * row;
    Header other;
    std::memcpy(&other, its, sizeof(other));
    agreed.squares += other.squares;
    if (other.bad_loss && bad_loss_rank < 0) bad_loss_rank = r;
    if (other.bad_parameter >= 0 && (agreed.bad_parameter < 0 || other.bad_parameter < agreed.bad_parameter)) {
      agreed.bad_parameter = other.bad_parameter;
      agreed.bad_rank = other.bad_rank;
    }
    for (std::size_t p = 0; p < present.size(); ++p) {
      agreed.present[p] |= static_cast<std::uint8_t>(its[sizeof(other) + p / 8] >> (p % 8)) & 1;
    }
  }
  if (agreed.bad_rank < 0) agreed.bad_rank = bad_loss_rank;
  return agreed;
}

}  // namespace unshard
