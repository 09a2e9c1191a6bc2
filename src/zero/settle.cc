// The agreed point: what each rank's user wrote since the last one moves to the shards.
#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "unshard/core/error.h"
#include "unshard/core/log.h"
#include "zero/key.h"
#include "zero/phase_scope.h"
#include "zero/raw_tensor.h"
#include "zero/state.h"

namespace unshard::zero {
namespace {

using Bitmap = std::vector<std::uint8_t>;

bool has(const Bitmap& bitmap, int id) { return (bitmap[static_cast<std::size_t>(id) / 8] >> (id % 8)) & 1; }

// Every rank's bitmap, by rank. Also the first fence: when it returns, every rank has stopped reading.
std::vector<Bitmap> exchange_bitmaps(StoreState& state, const Bitmap& mine) {
  const auto world = static_cast<std::size_t>(state.world);
  std::vector<Bitmap> all(world, Bitmap(mine.size()));
  if (state.world == 1) {
    all[0] = mine;
    return all;
  }
  if (auto* host = state.comm->host(); state.shared && host) {
    for (std::size_t begin = 0; begin < mine.size() || begin == 0; begin += HostGroup::kSmallBytes) {
      const auto bytes = std::min(HostGroup::kSmallBytes, mine.size() - begin);
      Bitmap chunk(bytes * world);
      host->all_gather_small(mine.data() + begin, bytes, chunk.data(), "settle: which parameters were written");
      for (std::size_t r = 0; r < world; ++r) {
        std::copy_n(chunk.begin() + static_cast<std::ptrdiff_t>(r * bytes), bytes, all[r].begin() + static_cast<std::ptrdiff_t>(begin));
      }
    }
    return all;
  }
  Bitmap input = mine, output(mine.size() * world);
  const auto numel = static_cast<std::int64_t>(mine.size());
  const auto in = tensor_over(input.data(), numel, c10::kByte, c10::kCPU, nullptr);
  auto out = tensor_over(output.data(), numel * state.world, c10::kByte, c10::kCPU, nullptr);
  state.comm->all_gather(out, in, "settle: which parameters were written");
  for (std::size_t r = 0; r < world; ++r) {
    std::copy_n(output.begin() + static_cast<std::ptrdiff_t>(r * mine.size()), mine.size(), all[r].begin());
  }
  return all;
}

constexpr std::size_t kHashBytes = sizeof(std::uint64_t);

// Whether ranks touched alike travels behind the bitmaps: of each mode the hash of the touches that its next plan is made of, which are
// those of this step so far, and of the last whole pass.
void append_traces(StoreState& state, Bitmap& mine) {
  const std::lock_guard lock(state.mutex);
  state.close_pass();
  for (auto& mode : state.modes) {
    const auto& trace = mode.trace;
    if (&mode == &state.of(Mode::train)) {
      mode.settled = {trace.recorded_hash(), trace.recorded().size(), false};
    } else {
      mode.settled = {trace.followed_hash(), trace.followed().size(), false};
    }
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(&mode.settled.hash);
    mine.insert(mine.end(), bytes, bytes + kHashBytes);
  }
}

void compare_traces(StoreState& state, const std::vector<Bitmap>& all) {
  const std::lock_guard lock(state.mutex);
  for (std::size_t mode = 0; mode < kModes; ++mode) {
    const auto hash = [&](const Bitmap& bitmap) { return bitmap.end() - static_cast<std::ptrdiff_t>((kModes - mode) * kHashBytes); };
    state.modes[mode].settled.equal = std::all_of(
        all.begin(), all.end(), [&](const Bitmap& bitmap) { return std::equal(hash(bitmap), hash(bitmap) + kHashBytes, hash(all[0])); });
  }
}

// What peers pulled from this rank since the last agreed point. Here, and not when it is sent: counts are read without a lock.
void count_pulls(StoreState& state) {
  if (!state.service) return;
  const auto sent = state.service->bytes_sent();
  const auto fresh = sent - std::exchange(state.counted_sent, sent);
  if (fresh == 0) return;
  state.comm->add_count("parameter_pull", fresh);
  if (state.hosted) state.comm->add_count(kHostLink, fresh);
}

// One line for all parameters that only some ranks wrote.
void warn_unequal(const StoreState& state, const std::vector<int>& changed, const std::vector<Bitmap>& all) {
  std::string text;
  int count = 0;
  for (const int id : changed) {
    std::string ranks;
    for (int r = 0; r < state.world; ++r) {
      if (has(all[static_cast<std::size_t>(r)], id)) ranks += cat(ranks.empty() ? "" : ", ", r);
    }
    const auto writers = std::count_if(all.begin(), all.end(), [id](const Bitmap& bitmap) { return has(bitmap, id); });
    if (writers == state.world) continue;
    if (++count <= 8)
      text += cat(count > 1 ? "; " : "", "'", state.entries[static_cast<std::size_t>(id)]->info.name, "' on rank ", ranks, " only");
  }
  if (count == 0 || state.rank != 0) return;
  if (count > 8) text += cat("; and ", count - 8, " more");
  log_warning(state.rank,
              cat("parameters written on some ranks only: ", text, ". Each rank kept its own slice of what it wrote, the other slices are ",
                  "as before; write the same value on every rank, or use GatheredParameters(modifier_rank=...)"));
}

std::uint64_t hash_bytes(const std::byte* data, std::size_t size) {
  std::uint64_t hash = 0xcbf29ce484222325ULL;  // FNV-1a, a word at a time
  for (; size >= 8; data += 8, size -= 8) {
    std::uint64_t word;
    std::memcpy(&word, data, 8);
    hash = (hash ^ word) * 0x100000001b3ULL;
    hash ^= hash >> 29;
  }
  for (; size > 0; ++data, --size) hash = (hash ^ static_cast<std::uint64_t>(*data)) * 0x100000001b3ULL;
  return hash;
}

// Debug: ranks that wrote one parameter must have written one value. Every rank throws alike.
void compare_values(StoreState& state, const std::vector<int>& changed) {
  std::string mine;
  for (const int id : changed) {
    const Entry& entry = *state.entries[static_cast<std::size_t>(id)];
    std::string hash = "-";
    if (entry.residence == Residence::written)
      hash = std::to_string(hash_bytes(static_cast<const std::byte*>(entry.copy.get()), entry.whole_bytes()));
    mine += hash + " ";
  }
  const auto all = state.comm->all_gather_strings(mine);
  std::vector<std::istringstream> streams;
  for (const auto& text : all) streams.emplace_back(text);
  for (const int id : changed) {
    std::map<std::string, std::string> ranks_by_hash;
    for (int r = 0; r < state.world; ++r) {
      std::string hash;
      streams[static_cast<std::size_t>(r)] >> hash;
      if (hash != "-") ranks_by_hash[hash] += cat(ranks_by_hash[hash].empty() ? "" : ", ", r);
    }
    if (ranks_by_hash.size() <= 1) continue;
    std::string groups;
    for (const auto& [hash, ranks] : ranks_by_hash) groups += cat(groups.empty() ? "" : " | ", "rank ", ranks);
    throw std::invalid_argument(cat("[zero.settle] parameter '", state.entries[static_cast<std::size_t>(id)]->info.name,
                                    "': ranks wrote different values (", groups,
                                    "); seed alike on every rank, or write inside GatheredParameters(modifier_rank=...)"));
  }
}

void move_to_shard(StoreState& state, Entry& entry) {
  std::memcpy(entry.shard, static_cast<std::byte*>(entry.copy.get()) + entry.slice_offset(state.rank), entry.slice_bytes(state.rank));
}

// The own slice of what was written here goes to the shard.
void settle_entry(StoreState& state, Entry& entry) {
  if (!entry.info.partitioned || state.world == 1) return;
  const std::lock_guard lock(state.mutex);
  if (entry.residence != Residence::written) return;
  move_to_shard(state, entry);
  entry.residence = Residence::gathered;
}

}  // namespace

std::vector<int> StoreState::settle() {
  require(!released, "[zero.settle] the store has released its parameters");
  check_storages();
  const Unobserved quiet;
  drain_prefetch();
  for (const auto& entry : entries) {
    require(!entry->editing, "[zero.settle] parameter '", entry->info.name, "' is being edited; leave GatheredParameters (end_edit) first");
  }
  Bitmap mine((entries.size() + 7) / 8);
  for (const auto& entry : entries) {
    const std::lock_guard lock(mutex);
    if (entry->changed) mine[static_cast<std::size_t>(entry->info.id) / 8] |= static_cast<std::uint8_t>(1U << (entry->info.id % 8));
    entry->changed = false;
  }
  if (host_copy) append_traces(*this, mine);
  const auto all = exchange_bitmaps(*this, mine);
  if (host_copy) compare_traces(*this, all);
  mark_fenced();
  count_pulls(*this);
  std::vector<int> changed;
  for (const auto& entry : entries) {
    if (std::any_of(all.begin(), all.end(), [&](const Bitmap& bitmap) { return has(bitmap, entry->info.id); }))
      changed.push_back(entry->info.id);
  }
  if (changed.empty()) return changed;
  warn_unequal(*this, changed, all);
  if (options.debug && world > 1) compare_values(*this, changed);
  for (const int id : changed) settle_entry(*this, *entries[static_cast<std::size_t>(id)]);
  if (world > 1) comm->barrier("settle: written values are stored");
  move_on(changed);
  refresh_held(changed);
  return changed;
}

}  // namespace unshard::zero
