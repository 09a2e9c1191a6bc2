#include "model.h"

#include <ATen/TensorGeometry.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <map>
#include <set>
#include <unordered_map>
#include <utility>

#include "flat.h"
#include "unshard/comm/communicator.h"
#include "unshard/core/dtype.h"
#include "unshard/core/error.h"
#include "unshard/zero/parameter_store.h"

namespace unshard {
namespace {

std::string check_group_names(const std::vector<ParamGroup>& groups, std::map<std::string, int>& group_of) {
  for (int g = 0; g < static_cast<int>(groups.size()); ++g) {
    for (const auto& name : groups[g].names) {
      if (const auto [at, fresh] = group_of.emplace(name, g); !fresh) {
        return cat("[engine] parameter '", name, "' is in groups ", at->second, " and ", g, "; put it in one");
      }
    }
  }
  return {};
}

std::string check_tensor(const std::string& name, const at::Tensor& tensor) {
  if (!tensor.defined()) return cat("[engine] parameter '", name, "' is undefined");
  if (tensor.layout() != c10::kStrided)
    return cat("[engine] parameter '", name, "' has layout ", tensor.layout(), "; dense parameters are supported");
  if (tensor.is_meta())
    return cat("[engine] parameter '", name, "' is on the meta device; give it values first, or build the model inside zero.Init");
  if (!tensor.is_non_overlapping_and_dense())
    return cat("[engine] parameter '", name, "' has overlapping or sparse strides ", tensor.strides(),
               "; give it memory of its own: parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)");
  return {};
}

// Bytes of its storage that a dense tensor covers.
std::pair<std::int64_t, std::int64_t> range_in_storage(const at::Tensor& tensor) {
  const auto begin = tensor.storage_offset() * static_cast<std::int64_t>(tensor.element_size());
  return {begin, begin + static_cast<std::int64_t>(tensor.nbytes())};
}

// Each parameter gets a place of its own (a master, a shard, a piece of the update): two that lie in the same memory would come apart.
// Frozen ones don't change; and two names for the very same elements stay together as long as they stay where they are.
std::string check_memory(const std::vector<ModelParameter>& parameters, int stage) {
  std::unordered_map<const c10::StorageImpl*, std::vector<const ModelParameter*>> of_storage;
  for (const auto& parameter : parameters) {
    auto& others = of_storage[parameter.tensor.storage().unsafeGetStorageImpl()];
    for (const auto* other : others) {
      const auto [a, a_end] = range_in_storage(other->tensor);
      const auto [b, b_end] = range_in_storage(parameter.tensor);
      if (a >= b_end || b >= a_end) continue;
      const bool same = a == b && a_end == b_end && other->geometry.sizes == parameter.geometry.sizes &&
                        other->geometry.strides == parameter.geometry.strides;
      const bool stays = stage < 3 && parameter.dtype == parameter.original_dtype && other->dtype == other->original_dtype;
      if (stage < 3 && !other->active && !parameter.active) continue;
      if (same && stays) continue;
      return cat("[engine] parameters '", other->name, "' and '", parameter.name, "' share memory but are two parameters; ",
                 same ? "register one nn.Parameter under both names (b.weight = a.weight)"
                      : "give each its own (parameter.data = parameter.data.clone()), or make one of them a view taken in forward");
    }
    others.push_back(&parameter);
  }
  return {};
}

}  // namespace

bool ModelParameter::is_row_major() const { return at::geometry_is_contiguous(geometry.sizes, geometry.strides); }

std::string Model::prepare(const NamedParameters& parameters, const std::vector<ParamGroup>& groups,
                           std::optional<c10::ScalarType> compute_dtype, int stage, const ParameterStore* store) {
  std::map<std::string, int> group_of;
  if (auto error = check_group_names(groups, group_of); !error.empty()) return error;
  std::unordered_map<const c10::TensorImpl*, std::size_t> known;
  std::set<std::string> names;
  for (const auto& [name, tensor] : parameters) {
    if (auto error = check_tensor(name, tensor); !error.empty()) return error;
    if (!names.insert(name).second) return cat("[engine] two parameters have the name '", name, "'");
    const auto group = groups.empty() ? (tensor.is_floating_point() ? 0 : -1) : (group_of.contains(name) ? group_of.at(name) : -1);
    group_of.erase(name);
    if (const auto at = known.find(tensor.unsafeGetTensorImpl()); at != known.end()) {
      aliases_.push_back({name, at->second});
      auto& first = parameters_[at->second];
      if (first.group < 0) first.group = group;
      first.active = first.group >= 0 && tensor.requires_grad();
      continue;
    }
    known.emplace(tensor.unsafeGetTensorImpl(), parameters_.size());
    ModelParameter parameter;
    parameter.name = name;
    parameter.tensor = tensor;
    parameter.group = group;
    parameter.active = group >= 0 && tensor.requires_grad();
    parameter.original_dtype = tensor.scalar_type();
    parameter.dtype = compute_dtype && tensor.is_floating_point() ? *compute_dtype : tensor.scalar_type();
    parameter.geometry = {tensor.sizes().vec(), tensor.strides().vec()};
    if (group >= 0 && !flat::is_supported(parameter.dtype)) {
      return cat("[engine] parameter '", name, "' would be trained in ", parameter.dtype,
                 "; fp32, bf16 and fp16 are supported. Convert it, or leave it "
                 "out of the parameter groups");
    }
    if (store && store->find(tensor) >= 0 && parameter.dtype != parameter.original_dtype) {
      return cat("[engine] parameter '", name, "' was built partitioned in ", dtype_name(parameter.original_dtype),
                 ", the config computes in ", dtype_name(parameter.dtype), "; give zero.Init the same config (or dtype)");
    }
    parameters_.push_back(std::move(parameter));
  }
  if (!group_of.empty())
    return cat("[engine] the parameter groups name '", group_of.begin()->first, "', which is not a parameter of the model");
  if (parameters_.empty()) return "[engine] the model has no parameters";
  return check_memory(parameters_, stage);
}

std::vector<std::string> Model::describe() const {
  std::vector<std::string> lines;
  for (const auto& parameter : parameters_) {
    lines.push_back(cat("parameter '", parameter.name, "' of shape ", at::IntArrayRef(parameter.geometry.sizes), " and dtype ",
                        dtype_name(parameter.original_dtype), ", group ", parameter.group, parameter.active ? "" : ", frozen"));
  }
  return lines;
}

void Model::take_over(ParameterStore& store, Masters& masters, const ZeroConfig& zero) {
  const at::NoGradGuard no_grad;
  std::int64_t persistent = 0;
  std::vector<ModelParameter> kept;
  std::vector<std::size_t> place(parameters_.size());  // old index -> index in kept
  for (std::size_t index = 0; index < parameters_.size(); ++index) {
    auto& parameter = parameters_[index];
    auto& tensor = parameter.tensor;
    at::Tensor original;  // flat
    int id = store.find(tensor);
    const bool held = id >= 0 && store.parameter(id).unsafeGetTensorImpl() == tensor.unsafeGetTensorImpl();
    if (tensor.grad().defined() && parameter.is_trained()) tensor.mutable_grad().reset();
    if (held) {
      store.rename(id, parameter.name);
    } else {
      original = flat::storage_view(tensor);
      if (store.comm().world_size() > 1 && original.numel() > 0) store.comm().broadcast(original, 0, parameter.name);
      if (parameter.dtype != parameter.original_dtype) tensor.set_data(tensor.detach().to(parameter.dtype));
      const auto numel = tensor.numel();
      const bool keep =
          zero.stage < 3 || (numel <= zero.param_persistence_threshold && persistent + numel <= zero.model_persistence_threshold);
      if (zero.stage == 3 && keep) persistent += numel;
      id = store.add(tensor, parameter.name, !keep);
    }
    parameter.id = id;
    parameter.layout = store.info(id).layout;
    const auto same = std::find_if(kept.begin(), kept.end(), [id](const ModelParameter& other) { return other.id == id; });
    place[index] = static_cast<std::size_t>(same - kept.begin());
    if (same != kept.end()) {  // another tensor on a storage that is known
      same->tied.push_back(tensor);
      aliases_.push_back({parameter.name, index});
      continue;
    }
    if (parameter.active && parameter.dtype != c10::kFloat) {
      masters.reserve({{id, parameter.layout}});
      // A partitioned parameter that kept its dtype has given its storage, which `original` shows, to the store.
      if (original.defined() && !(store.info(id).partitioned && parameter.dtype == parameter.original_dtype)) {
        // From the values in the compute dtype: the same start whether or not the model was built partitioned (then only these exist),
        // and the weights are at every moment the cast of their masters.
        masters.set_whole(id, original.to(parameter.dtype));
      } else {
        flat::copy(masters.piece(id), store.own_slice(id));
      }
    }
    kept.push_back(std::move(parameter));
  }
  for (auto& alias : aliases_) alias.index = place[alias.index];
  parameters_ = std::move(kept);
  index_ids();
}

void Model::index_ids() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const auto id = static_cast<std::size_t>(parameters_[i].id);
    if (by_id_.size() <= id) by_id_.resize(id + 1, -1);
    by_id_[id] = static_cast<int>(i);
  }
}

const ModelParameter* Model::find(int id) const {
  if (id < 0 || static_cast<std::size_t>(id) >= by_id_.size() || by_id_[id] < 0) return nullptr;
  return &parameters_[by_id_[id]];
}

const ModelParameter& Model::at(int id, const char* where) const {
  const auto* parameter = find(id);
  require(parameter != nullptr, "[engine.", where, "] there is no parameter with id ", id);
  return *parameter;
}

const ModelParameter* Model::find(const std::string& name) const {
  for (const auto& parameter : parameters_) {
    if (parameter.name == name) return &parameter;
  }
  for (const auto& alias : aliases_) {
    if (alias.name == name) return &parameters_[alias.index];
  }
  return nullptr;
}

std::map<std::string, std::string> Model::shared_names() const {
  std::map<std::string, std::string> names;
  for (const auto& alias : aliases_) names.emplace(alias.name, parameters_[alias.index].name);
  return names;
}

std::int64_t Model::numel() const {
  std::int64_t total = 0;
  for (const auto& parameter : parameters_) total += parameter.tensor.numel();
  return total;
}

std::int64_t Model::largest_numel() const {
  std::int64_t largest = 0;
  for (const auto& parameter : parameters_) largest = std::max(largest, parameter.tensor.numel());
  return largest;
}

std::int64_t Model::hidden_size() const {
  std::int64_t largest = 0, side = 0;
  for (const auto& parameter : parameters_) {
    if (parameter.tensor.dim() != 2 || parameter.tensor.numel() <= largest) continue;
    largest = parameter.tensor.numel();
    side = std::min(parameter.tensor.size(0), parameter.tensor.size(1));
  }
  return side;
}

c10::Device Model::device() const { return parameters_.front().tensor.device(); }

std::vector<std::string> Model::names_by_id() const {
  std::vector<std::string> names(by_id_.size());
  for (const auto& parameter : parameters_) names[parameter.id] = parameter.name;
  return names;
}

}  // namespace unshard
