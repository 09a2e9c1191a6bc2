#include "inference/stream/units.h"

#include <algorithm>
#include <numeric>

#include "unshard/core/error.h"
#include "unshard/inference/engine.h"
#include "unshard/offload/async_file.h"

namespace unshard::inference {

std::int64_t Unit::add(Matrix::Packed& matrix) {
  std::int64_t end = 0;
  if (!places.empty()) end = places.back().offset + round_up(places.back().matrix->bytes, 64);
  places.push_back({&matrix, end});
  bytes = offload::whole_blocks(end + matrix.bytes);
  return end;
}

void Unit::place(std::uint8_t* memory) const {
  for (const auto& [matrix, offset] : places) matrix->place(memory + offset);
}

ResidencyPlan plan_residency(const std::vector<std::int64_t>& unit_bytes, std::int64_t budget, const std::string& model) {
  ResidencyPlan plan;
  plan.slot_bytes = std::ranges::max(unit_bytes);
  if (budget < plan.slot_bytes)
    throw ModelError(cat(model, ": its largest layer takes ", plan.slot_bytes, " bytes, more than the ", budget,
                         " that weights may take (weight_memory); give at least that, three times as much to read ahead"));
  plan.slots = std::min(kMostSlots, budget / plan.slot_bytes);
  plan.stays.resize(unit_bytes.size());
  const std::int64_t total = std::accumulate(unit_bytes.begin(), unit_bytes.end(), std::int64_t{0});
  std::int64_t left = budget - plan.slots * plan.slot_bytes;
  const double share = static_cast<double>(left) / static_cast<double>(total);
  double credit = 0;
  const auto keep = [&](std::size_t i) {
    if (plan.stays[i] || unit_bytes[i] > left) return false;
    left -= unit_bytes[i];
    plan.stays[i] = true;
    return true;
  };
  for (std::size_t i = 0; i < unit_bytes.size(); ++i) {
    const auto bytes = static_cast<double>(unit_bytes[i]);
    credit += bytes * share;
    if (credit >= bytes && keep(i)) credit -= bytes;
  }
  for (std::size_t i = 0; i < unit_bytes.size(); ++i) keep(i);  // what rounding left over
  return plan;
}

}  // namespace unshard::inference
