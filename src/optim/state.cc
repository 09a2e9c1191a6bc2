#include "optim/state.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <map>

#include "unshard/core/error.h"

namespace unshard {
namespace {

/// Each parameter's values begin at a cache line.
constexpr std::int64_t kAlignment = 16;

std::int64_t padded(std::int64_t numel) { return (numel + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

std::size_t OptimizerState::index(std::string_view name) const {
  return static_cast<std::size_t>(std::find(names_.begin(), names_.end(), name) - names_.begin());
}

OptimizerState::Entry& OptimizerState::entry(int parameter) {
  Entry& entry = entries_[parameter];
  if (entry.values.empty()) entry.values.resize(names_.size());
  return entry;
}

const OptimizerState::Entry* OptimizerState::find(int parameter) const {
  const auto it = entries_.find(parameter);
  return it == entries_.end() ? nullptr : &it->second;
}

void OptimizerState::create(const std::vector<Request>& requests) {
  std::map<std::pair<std::size_t, std::string>, std::vector<const Request*>> missing;
  for (const auto& request : requests) {
    const at::Tensor& value = entry(request.parameter).values.at(request.name);
    if (!value.defined()) {
      missing[{request.name, request.device.str()}].push_back(&request);
      continue;
    }
    require(value.numel() == request.numel, "[optim] parameter ", request.parameter, " now has ", request.numel, " elements, its state \"",
            names_[request.name], "\" has ", value.numel(), "; make a new optimizer when pieces change");
  }
  for (const auto& [key, group] : missing) {
    std::int64_t total = 0;
    for (const auto* request : group) total += padded(request->numel);
    const at::Tensor arena = at::empty({total}, at::TensorOptions().dtype(at::kFloat).device(group.front()->device));
    arena.zero_();
    bytes_ += total * static_cast<std::int64_t>(sizeof(float));
    std::int64_t offset = 0;
    for (const auto* request : group) {
      at::Tensor view = arena.narrow(0, offset, request->numel);
      if (request->initial != 0) view.fill_(request->initial);
      entry(request->parameter).values[request->name] = std::move(view);
      offset += padded(request->numel);
    }
  }
}

}  // namespace unshard
