// After the optimizer wrote this rank's pieces: everyone sees the new values.
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>

#include "unshard/core/error.h"
#include "zero/phase_scope.h"
#include "zero/raw_tensor.h"
#include "zero/state.h"

namespace unshard::zero {
namespace {

// The gather buffer is reused from bucket to bucket; a small one stays in the cache and costs no page faults at each step.
constexpr std::int64_t kBufferBytes = 16 << 20;

// Elements [begin, begin + numel) of every rank's piece of one parameter.
struct Segment {
  Entry* entry;
  std::int64_t begin, numel;
};

// Real elements of the segment on `rank` (the last pieces are short).
std::int64_t real_numel(const Segment& segment, int rank) {
  return std::clamp<std::int64_t>(segment.entry->info.layout.size(rank) - segment.begin, 0, segment.numel);
}

void copy_piece(const Segment& segment, int rank, std::byte* packed, bool pack) {
  const auto bytes = static_cast<std::size_t>(real_numel(segment, rank)) * segment.entry->element_bytes();
  if (bytes == 0) return;
  auto* piece = segment.entry->whole_data() +
                static_cast<std::size_t>(segment.entry->info.layout.begin(rank) + segment.begin) * segment.entry->element_bytes();
  pack ? std::memcpy(packed, piece, bytes) : std::memcpy(piece, packed, bytes);
}

void gather_bucket_on_device(StoreState& state, const std::vector<Segment>& bucket);

void gather_bucket(StoreState& state, const std::vector<Segment>& bucket) {
  if (!bucket[0].entry->parameter.is_cpu()) return gather_bucket_on_device(state, bucket);
  std::int64_t bytes = 0;
  for (const auto& segment : bucket) bytes += segment.numel * static_cast<std::int64_t>(segment.entry->element_bytes());
  if (!state.publish_buffer.defined() || state.publish_buffer.numel() < bytes * state.world) {
    state.publish_input = at::empty({bytes}, c10::kByte);
    state.publish_buffer = at::empty({bytes * state.world}, c10::kByte);
  }
  const auto input = flat_view(state.publish_input, 0, bytes);
  auto output = flat_view(state.publish_buffer, 0, bytes * state.world);
  auto* packed = static_cast<std::byte*>(input.mutable_data_ptr());
  for (const auto& segment : bucket) {
    copy_piece(segment, state.rank, packed, /*pack=*/true);
    packed += static_cast<std::size_t>(segment.numel) * segment.entry->element_bytes();
  }
  state.comm->all_gather(output, input, cat("publish: ", bucket[0].entry->info.name, bucket.size() > 1 ? ".." : ""));
  auto* received = static_cast<std::byte*>(output.mutable_data_ptr());
  for (int rank = 0; rank < state.world; ++rank) {
    for (const auto& segment : bucket) {
      if (rank != state.rank) copy_piece(segment, rank, received, /*pack=*/false);
      received += static_cast<std::size_t>(segment.numel) * segment.entry->element_bytes();
    }
  }
}

// The same through tensor operators, for memory the CPU can't reach.
void gather_bucket_on_device(StoreState& state, const std::vector<Segment>& bucket) {
  for (const auto& segment : bucket) {
    const auto& info = segment.entry->info;
    const auto options = at::TensorOptions().dtype(info.dtype).device(segment.entry->parameter.device());
    auto input = at::empty({segment.numel}, options);
    auto output = at::empty({segment.numel * state.world}, options);
    const auto piece = [&](int rank) {
      return flat_view(segment.entry->parameter, info.layout.begin(rank) + segment.begin, real_numel(segment, rank));
    };
    flat_view(input, 0, real_numel(segment, state.rank)).copy_(piece(state.rank));
    state.comm->all_gather(output, input, cat("publish: ", info.name));
    for (int rank = 0; rank < state.world; ++rank) {
      const auto numel = real_numel(segment, rank);
      if (rank != state.rank && numel > 0) piece(rank).copy_(flat_view(output, rank * segment.numel, numel));
    }
  }
}

void gather_whole_parameters(StoreState& state, const std::vector<std::uint8_t>& updated) {
  std::vector<Segment> bucket;
  std::int64_t room_numel = 0, room_bytes = 0;
  const auto reset = [&] {
    bucket.clear();
    room_numel = std::max<std::int64_t>(1, state.options.allgather_bucket_numel / state.world);
    room_bytes = kBufferBytes / state.world;
  };
  reset();
  for (const auto& entry : state.entries) {
    const auto& info = entry->info;
    if (info.partitioned || info.layout.numel == 0 || !updated[static_cast<std::size_t>(info.id)]) continue;
    const auto element_bytes = static_cast<std::int64_t>(entry->element_bytes());
    for (std::int64_t begin = 0; begin < info.layout.shard_numel();) {
      auto numel = std::min({info.layout.shard_numel() - begin, room_numel, room_bytes / element_bytes});
      const bool other_device = !bucket.empty() && bucket[0].entry->parameter.device() != entry->parameter.device();
      if (numel <= 0 || other_device) {
        gather_bucket(state, bucket);
        reset();
        continue;
      }
      bucket.push_back({entry.get(), begin, numel});
      begin += numel;
      room_numel -= numel;
      room_bytes -= numel * element_bytes;
    }
  }
  if (!bucket.empty()) gather_bucket(state, bucket);
}

void bump_version(const at::Tensor& tensor) {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

}  // namespace

void StoreState::publish(const std::vector<std::uint8_t>& updated) {
  require(!released, "[zero.publish] the store has released its parameters");
  require(updated.size() == entries.size(), "[zero.publish] got ", updated.size(), " flags for ", entries.size(), " parameters");
  const Unobserved quiet;
  const PhaseScope phase(*comm, Phase::publishing, {});
  drain_prefetch();
  if (world > 1) gather_whole_parameters(*this, updated);
  std::vector<int> ids;
  for (const auto& entry : entries) {
    if (!updated[static_cast<std::size_t>(entry->info.id)]) continue;
    ids.push_back(entry->info.id);
    bump_version(entry->parameter);
    for (const auto& tensor : entry->tied) bump_version(tensor);
  }
  const bool read_by_others =
      shared || std::any_of(entries.begin(), entries.end(), [](const auto& entry) { return entry->info.partitioned; });
  if (world > 1 && read_by_others) comm->barrier("publish");  // each gathered what it needs, or pulls it from its owner later
  mark_fenced();
  move_on(ids);
  refresh_held(ids);
}

}  // namespace unshard::zero
