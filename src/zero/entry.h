#pragma once
// One parameter of a store.
#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstddef>
#include <string>
#include <vector>

#include "unshard/zero/parameter_store.h"
#include "zero/touch_target.h"

namespace unshard::zero {

struct StoreState;

/// Where the whole value of a partitioned parameter is, on this rank.
enum class Residence : std::uint8_t {
  at_rest,  ///< no private copy: served from memory that holds the whole value, else not readable; -> filling, gathered (prefetch), written
  filling,  ///< a thread makes the private copy, without a lock; others wait; -> gathered, written, at_rest (it failed)
  gathered,  ///< a private copy equal to the shards; -> at_rest (released), written
  written,   ///< a private copy this rank wrote: serves its reads; -> at_rest (settled), gathered (settled while pinned)
};

// [Note: readable only while pinned] The storage of a partitioned parameter may hold a pointer all the time (to shared memory, or to a
// cached copy), but data_ptr() throws unless an operator or a scope pins it. Raw pointers and aliases without the key would otherwise
// outlive a release, or read and write a copy that nobody keeps.
struct Entry final : TouchTarget {
  Pinned pin(Access access) override;
  void finish_lockstep_write() override;
  void unpin(bool abandon) noexcept override;
  bool lives_in_storage() const override { return false; }
  std::int64_t whole_numel() const override { return info.layout.numel; }
  bool is_exactly(const at::Tensor& tensor) const override {
    return tensor.sizes() == info.sizes && tensor.strides() == strides && tensor.storage_offset() == 0 && !tensor.is_conj() &&
           !tensor.is_neg();
  }
  void derive(const at::Tensor& result) override;

  std::size_t element_bytes() const { return c10::elementSize(info.dtype); }
  std::size_t whole_bytes() const { return static_cast<std::size_t>(info.layout.numel) * element_bytes(); }
  std::size_t padded_bytes() const { return static_cast<std::size_t>(info.layout.padded_numel()) * element_bytes(); }
  std::size_t slice_offset(int rank) const { return static_cast<std::size_t>(info.layout.begin(rank)) * element_bytes(); }
  /// First byte of a parameter that is kept whole.
  std::byte* whole_data() const {
    auto* data = parameter.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()->mutable_data();
    return static_cast<std::byte*>(data) + static_cast<std::size_t>(parameter.storage_offset()) * element_bytes();
  }
  std::size_t slice_bytes(int rank) const { return static_cast<std::size_t>(info.layout.size(rank)) * element_bytes(); }

  StoreState* store = nullptr;
  ParameterInfo info;
  std::vector<std::int64_t> strides;  ///< the order of elements that layout and optimizer state are kept in
  at::Tensor parameter;
  std::vector<at::Tensor> tied;  ///< other tensors of the user on the same storage
  /// The storage the entry owns; held here, never reached through the parameter, which may be given another one (set_, .data =).
  c10::intrusive_ptr<c10::StorageImpl> storage;
  bool original_resizable = false;
  c10::StorageImpl* known_storage = nullptr;  ///< parameters kept whole: to see that it was replaced

  /// Room for the whole value at rest, in memory of this rank or of its host; else nullptr. With `elsewhere_numel` it holds the whole value
  /// only while the parameter is present on this host.
  std::byte* home = nullptr;
  std::byte* shard = nullptr;  ///< this rank's piece at rest
  at::DataPtr home_owner;      ///< of `home` or `shard`, unless a segment owns it

  std::int64_t elsewhere_numel = 0;  ///< elements that rest on other hosts (one copy a host); 0: `home` is the value
  std::int64_t elsewhere_bytes() const { return elsewhere_numel * static_cast<std::int64_t>(element_bytes()); }

  /// Changes of the value so far, over all ranks: counted behind the fence that closes each. Written with the store's mutex held.
  std::atomic<std::uint32_t> epoch{0};

  // Guarded by the store's mutex.
  std::uint32_t fill_epoch = 0;  ///< when the private copy began to be made
  std::uint32_t failed_fills = 0;
  Residence residence = Residence::at_rest;
  at::DataPtr copy;  ///< the private copy, padded
  int pins = 0;
  bool held = false;     ///< this rank counts as a user of the host's copy
  bool stale = false;    ///< release the copy at the last unpin: the value at rest has moved on
  bool changed = false;  ///< the user changed the value here since the last agreed point
  bool editing = false;  ///< between begin_edit and end_edit

  /// Ranks may not have stored their pieces yet (since add, or in lockstep): a read asks the write counters first.
  std::atomic<bool> unfenced{false};
};

}  // namespace unshard::zero
