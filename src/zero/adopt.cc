// Parameters come under a store, and come back to it when the user gave them another storage.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/StorageImpl.h>

#include <cstring>

#include "unshard/core/dtype.h"
#include "unshard/core/error.h"
#include "zero/key.h"
#include "zero/raw_tensor.h"
#include "zero/registry.h"
#include "zero/state.h"

namespace unshard::zero {
namespace {

constexpr std::size_t kAlignment = 64;  // a cache line; vector kernels never straddle two parameters
constexpr std::size_t kPage = 4096, kManyPages = 4 * kPage;
std::size_t aligned(std::size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

c10::StorageImpl* storage_of(const at::Tensor& tensor) { return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl(); }

std::string shape_text(c10::IntArrayRef sizes) {
  std::ostringstream out;
  out << sizes;
  return out.str();
}

void require_addable(const at::Tensor& parameter, const std::string& name) {
  require(parameter.defined(), "[zero.add] parameter '", name, "' is an undefined tensor");
  require(parameter.layout() == c10::kStrided, "[zero.add] parameter '", name,
          "' is sparse; only dense parameters can be trained here: leave it ", "out, or make it dense with to_dense()");
  require(!parameter.is_meta(), "[zero.add] parameter '", name,
          "' is on the meta device and has no bytes; materialise it first (to_empty and an ",
          "initialisation), or build the model inside zero.Init");
  require(parameter.has_storage() && !parameter.key_set().has(c10::DispatchKey::Python), "[zero.add] parameter '", name,
          "' is a tensor subclass without a storage of its own (a DTensor?); add its local tensor instead");
  require(parameter.is_non_overlapping_and_dense(), "[zero.add] parameter '", name, "' (shape ", shape_text(parameter.sizes()),
          ", strides ", shape_text(parameter.strides()), ") overlaps itself or has holes; replace it with its contiguous() copy");
  require(!parameter.is_conj() && !parameter.is_neg(), "[zero.add] parameter '", name,
          "' is a lazy conjugate or negative; resolve it first");
}

// The storage is emptied: whoever else uses it without the key finds the message.
void take_storage(Entry& entry, const std::string& message) {
  auto& storage = *entry.storage;
  entry.original_allocator = storage.allocator();
  entry.original_resizable = storage.resizable();
  if (!entry.original_allocator) entry.original_allocator = c10::GetAllocator(storage.device_type());
  storage.set_allocator(&entry);
  storage.set_resizable(false);
  storage.set_data_ptr_noswap(c10::DataPtr(entry.home, storage.device()));
  set_unreadable_message(storage, message);
}

void give_storage(Entry& entry, const at::Tensor& tensor) {
  auto* impl = tensor.unsafeGetTensorImpl();
  const bool allowed = impl->allow_tensor_metadata_change();
  impl->set_allow_tensor_metadata_change(true);
  if (storage_of(tensor) != entry.storage.get()) impl->set_storage_keep_dtype(c10::Storage(entry.storage));
  impl->set_sizes_and_strides(entry.info.sizes, entry.strides, 0);
  impl->set_allow_tensor_metadata_change(allowed);
  add_touch_keys(tensor);
}

c10::intrusive_ptr<c10::StorageImpl> empty_storage(std::size_t bytes, c10::Device device) {
  return c10::make_storage_impl(c10::StorageImpl::use_byte_size_t(), c10::SymInt(static_cast<std::int64_t>(bytes)),
                                c10::DataPtr(nullptr, device), c10::GetAllocator(device.type()), /*resizable=*/true, device);
}

// A dense copy of the tensor's value in the entry's order of elements.
at::Tensor copy_in_order(const Entry& entry, const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  auto value = [&] {
    const Unobserved quiet;
    return at::empty_strided(entry.info.sizes, entry.strides, c10::TensorOptions().dtype(entry.info.dtype).device(tensor.device()));
  }();
  if (target_of(*storage_of(tensor))) {
    value.copy_(tensor.detach());  // through touch: a view of a partitioned parameter
  } else {
    const Unobserved quiet;
    value.copy_(tensor);
  }
  return value;
}

void require_same_kind(const Entry& entry, const at::Tensor& tensor) {
  const auto& info = entry.info;
  const auto device = entry.storage ? entry.storage->device() : tensor.device();
  require(
      tensor.scalar_type() == info.dtype && tensor.sizes() == info.sizes && tensor.layout() == c10::kStrided && tensor.device() == device,
      "[zero.check_storages] parameter '", info.name, "' was given other data: it was ", dtype_name(info.dtype), " ",
      shape_text(info.sizes), " on ", device.str(), " when it was added and is ", dtype_name(tensor.scalar_type()), " ",
      tensor.layout() == c10::kStrided ? shape_text(tensor.sizes()) : std::string("sparse"), " on ", tensor.device().str(),
      " now; change dtype, shape or device before the engine is made");
}

// Through a tensor: a world of one may rest on a GPU, where memcpy can't reach.
void copy_bytes(const Entry& entry, void* to, void* from) {
  const Unobserved quiet;
  const auto numel = static_cast<std::int64_t>(entry.whole_bytes());
  const auto over = [&](void* data) { return tensor_over(data, numel, c10::kByte, entry.storage->device(), nullptr); };
  over(to).copy_(over(from));
}

// `w.data = x`, set_(), .to(memory_format=...): the new value counts as written here.
void readopt(StoreState& state, Entry& entry, const at::Tensor& tensor) {
  const auto value = copy_in_order(entry, tensor);
  const auto pinned = state.pin(entry, Access::overwrite);
  try {
    copy_bytes(entry, entry.storage->mutable_data(), value.mutable_data_ptr());
    give_storage(entry, tensor);
    if (pinned.lockstep_write) state.finish_lockstep_write(entry);
  } catch (...) {
    state.unpin(entry, pinned.fresh_copy);
    throw;
  }
  state.unpin(entry, false);
}

void check_partitioned(StoreState& state, Entry& entry, const at::Tensor& tensor) {
  const bool ours = storage_of(tensor) == entry.storage.get() && tensor.storage_offset() == 0 && tensor.strides() == entry.strides &&
                    tensor.sizes() == entry.info.sizes && tensor.scalar_type() == entry.info.dtype;
  if (ours && has_touch_keys(tensor)) return;
  require_same_kind(entry, tensor);
  if (ours) return add_touch_keys(tensor);
  readopt(state, entry, tensor);
}

void check_whole(Entry& entry) {
  auto* storage = storage_of(entry.parameter);
  if (storage == entry.known_storage && entry.parameter.strides() == entry.strides) return;
  require_same_kind(entry, entry.parameter);
  if (entry.parameter.strides() != entry.strides) {
    const auto value = copy_in_order(entry, entry.parameter);  // optimizer state is kept in the first order
    auto* impl = entry.parameter.unsafeGetTensorImpl();
    impl->set_storage_keep_dtype(value.storage());
    impl->set_sizes_and_strides(entry.info.sizes, entry.strides, 0);
    storage = storage_of(entry.parameter);
  }
  unregister_storage(entry.known_storage, &entry);
  entry.known_storage = storage;
  register_storage(storage, &entry);
  entry.changed = true;
}

}  // namespace

std::string StoreState::unreadable_message(const Entry& entry) const {
  return cat("parameter '", entry.info.name, "' is partitioned (ZeRO-3): operators can use it, but its bytes can't be reached below them ",
             "(data_ptr, numpy, or an alias made before it was partitioned). Read a copy from clone() (of a whole "
             "state dict: copy.deepcopy(model.state_dict()), or engine.save_16bit_model), or hold it whole with GatheredParameters / "
             "unshard.whole(...) (C++: unshard::Whole)");
}

namespace {

// \return the id when this store has the tensor already, under this or another name; -1: it is new.
int find_tied(StoreState& state, const at::Tensor& parameter, const std::string& name) {
  Entry* known = find_entry(storage_of(parameter));
  if (!known) return -1;
  require(known->store == &state, "[zero.add] parameter '", name, "' already belongs to another engine's store, as '", known->info.name,
          "'; destroy that engine first");
  const bool same_view = parameter.numel() == known->info.layout.numel && parameter.storage_offset() == known->parameter.storage_offset() &&
                         parameter.scalar_type() == known->info.dtype && parameter.strides() == known->strides &&
                         parameter.sizes() == known->info.sizes;
  if (parameter.unsafeGetTensorImpl() == known->parameter.unsafeGetTensorImpl()) return known->info.id;
  if (!same_view && !known->info.partitioned) return -1;  // slices of one storage, all kept whole
  require(same_view, "[zero.add] parameter '", name, "' shares memory with '", known->info.name, "' but shows it in another shape (",
          shape_text(parameter.sizes()), " of ", shape_text(known->info.sizes),
          "); make it a view of that parameter in forward, or give it its own copy");
  for (const auto& tensor : known->tied) {
    if (tensor.unsafeGetTensorImpl() == parameter.unsafeGetTensorImpl()) return known->info.id;
  }
  known->tied.push_back(parameter);
  if (known->info.partitioned) add_touch_keys(parameter);
  return known->info.id;
}

// The own piece of the value at `source` moves to its resting place.
void settle_in(StoreState& state, Entry& entry, const std::byte* source) {
  if (state.segment) {
    // Large ones start on a page of their own, so that all pages of other hosts' pieces can be given back.
    const std::size_t alignment = state.hosted && entry.padded_bytes() > kManyPages ? kPage : kAlignment;
    const std::size_t offset = (state.segment_used + alignment - 1) / alignment * alignment;
    state.segment_used = offset + aligned(entry.padded_bytes());
    entry.home = state.segment->data() + offset;
    entry.shard = entry.home + entry.slice_offset(state.rank);
    if (!state.hosted) {
      state.segment->reserve(state.segment_used);
    } else {
      for (const auto& [first, end] : state.elsewhere) {
        for (int peer = first; peer < end; ++peer) entry.elsewhere_numel += entry.info.layout.size(peer);
      }
      state.host_copy->add(entry.info.id, entry.info.name, [&] { state.set_up_home(entry); });
    }
  } else {
    const auto shard_bytes = static_cast<std::size_t>(entry.info.layout.shard_numel()) * entry.element_bytes();
    entry.home_owner = c10::GetAllocator(c10::kCPU)->allocate(shard_bytes);
    entry.shard = static_cast<std::byte*>(entry.home_owner.get());
  }
  std::memcpy(entry.shard, source + entry.slice_offset(state.rank), entry.slice_bytes(state.rank));
}

void partition(StoreState& state, Entry& entry) {
  const at::Tensor& parameter = entry.parameter;
  auto* held = storage_of(parameter);
  const auto device = held->device();
  auto* source =
      static_cast<std::byte*>(held->mutable_data()) + static_cast<std::size_t>(parameter.storage_offset()) * entry.element_bytes();
  const bool alone = parameter.storage_offset() == 0 && held->nbytes() == entry.whole_bytes();
  // Slices of one storage (flattened weights): this one gets a storage of its own, the others keep theirs.
  entry.storage = alone ? c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(held) : empty_storage(entry.whole_bytes(), device);
  if (state.world > 1) {
    require(device.is_cpu(), "[zero.add] parameter '", entry.info.name, "' is on ", device.str(),
            ": partitioned parameters of several ranks rest in ", "host memory for now; use ZeRO stage 0 to 2 on this device, or one rank");
    settle_in(state, entry, source);
  } else if (alone) {
    entry.home_owner = held->set_data_ptr(c10::DataPtr(nullptr, device));
    entry.home = entry.shard = source;
  } else {
    const auto value = copy_in_order(entry, parameter);
    entry.home_owner = value.storage().unsafeGetStorageImpl()->set_data_ptr(c10::DataPtr(nullptr, device));
    entry.home = entry.shard = static_cast<std::byte*>(entry.home_owner.get());
  }
  take_storage(entry, state.unreadable_message(entry));
  give_storage(entry, parameter);
}

}  // namespace

int StoreState::add(const at::Tensor& parameter, const std::string& name, bool partitioned) {
  require(!released, "[zero.add] parameter '", name, "' is added to a store that has released its parameters");
  require_addable(parameter, name);
  if (parameter.numel() > 0) {
    if (const int id = find_tied(*this, parameter, name); id >= 0) return id;
  }
  auto fresh = std::make_unique<Entry>();
  Entry& entry = *fresh;
  entry.store = this;
  entry.parameter = parameter;
  entry.strides = parameter.strides().vec();
  entry.info = {static_cast<int>(entries.size()), name, parameter.sizes().vec(), parameter.scalar_type(),
                {parameter.numel(), world},       false};
  entry.info.partitioned = partitioned && parameter.numel() > 0;
  if (entry.info.partitioned) partition(*this, entry);
  entry.known_storage = entry.info.partitioned ? entry.storage.get() : storage_of(parameter);
  if (parameter.numel() > 0) register_storage(entry.known_storage, &entry);
  if (counters && entry.info.partitioned) {
    counters->add(entry.info.id);
    entry.unfenced.store(true, std::memory_order_release);
  }
  const std::lock_guard lock(mutex);
  entries.push_back(std::move(fresh));
  live.push_back(0);
  for (auto& each : modes) each.trace.add(entry.info.layout.numel);
  return entry.info.id;
}

void StoreState::rename(int id, const std::string& name) {
  Entry& entry = at(id, "rename");
  const std::lock_guard lock(mutex);
  entry.info.name = name;
  if (!entry.info.partitioned || released) return;
  set_unreadable_message(*entry.storage, unreadable_message(entry));
  if (entry.pins > 0) make_readable(*entry.storage);
}

void StoreState::check_storages() {
  if (released) return;
  for (const auto& entry : entries) {
    if (entry->info.layout.numel == 0) continue;
    if (!entry->info.partitioned) {
      check_whole(*entry);
      continue;
    }
    check_partitioned(*this, *entry, entry->parameter);
    for (const auto& tensor : entry->tied) check_partitioned(*this, *entry, tensor);
  }
}

}  // namespace unshard::zero
