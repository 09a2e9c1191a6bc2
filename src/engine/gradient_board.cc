#include "gradient_board.h"

#include <algorithm>

#include "unshard/comm/host_group.h"

namespace unshard {
namespace {
constexpr std::size_t kPage = 4096;
std::size_t round_up(std::size_t value, std::size_t unit) { return (value + unit - 1) / unit * unit; }
}  // namespace

GradientBoard::GradientBoard(HostGroup& host, const BucketPlan& plan, std::int64_t ring_bytes) : buckets_(plan.buckets.size()) {
  const auto world = static_cast<std::size_t>(host.size());
  slot_bytes_ = std::max(round_up(static_cast<std::size_t>(plan.largest_bucket_bytes()), kPage), kPage);
  const auto affordable = static_cast<std::size_t>(ring_bytes) / slot_bytes_;
  slots_ = static_cast<int>(std::max<std::size_t>(2, std::min(buckets_, affordable))) + 1;

  std::size_t size = 0;
  const auto place = [&size](std::size_t bytes, std::size_t alignment) {
    const auto at = round_up(size, alignment);
    size = at + bytes;
    return at;
  };
  const auto ranks = place(world * sizeof(Rank), 64);
  const auto counts = place(world * buckets_ * sizeof(std::atomic<std::uint32_t>), 64);
  const auto consumed = place(world * slots_ * sizeof(std::atomic<std::uint32_t>), 64);
  const auto entries = place(world * slots_ * sizeof(Entry), 64);
  const auto data = place(world * slots_ * slot_bytes_, kPage);
  segment_ = host.create_segment("gradient buckets", size, size);
  auto* base = segment_->data();
  ranks_ = reinterpret_cast<Rank*>(base + ranks);
  counts_ = reinterpret_cast<std::atomic<std::uint32_t>*>(base + counts);
  consumed_ = reinterpret_cast<std::atomic<std::uint32_t>*>(base + consumed);
  entries_ = reinterpret_cast<Entry*>(base + entries);
  data_ = base + data;
}

GradientBoard::~GradientBoard() = default;

}  // namespace unshard
