#include "zero/operator_traits.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <string_view>
#include <unordered_set>

namespace unshard::zero {
namespace {

using Names = std::unordered_set<std::string_view>;

// They read shapes, dtypes or flags only.
const Names& no_read_names() {
  static const Names names{"empty_like",
                           "zeros_like",
                           "ones_like",
                           "full_like",
                           "rand_like",
                           "randn_like",
                           "randint_like",
                           "new_empty",
                           "new_empty_strided",
                           "new_full",
                           "new_ones",
                           "new_zeros",
                           "_new_zeros_with_same_feature_meta",
                           "_has_compatible_shallow_copy_type",
                           "is_same_size",
                           "result_type",
                           "can_cast",
                           "is_set_to",
                           "is_floating_point",
                           "is_complex",
                           "is_signed",
                           "is_conj",
                           "is_neg",
                           "is_inference",
                           "is_distributed",
                           "is_leaf",
                           "is_contiguous",
                           "sym_is_contiguous",
                           "is_non_overlapping_and_dense",
                           "is_strides_like_format",
                           "_is_zerotensor",
                           "is_coalesced",
                           "output_nr",
                           "_version",
                           "retains_grad",
                           "size",
                           "stride",
                           "storage_offset",
                           "numel",
                           "dim",
                           "element_size",
                           "sparse_dim",
                           "dense_dim",
                           "sym_size",
                           "sym_stride",
                           "sym_numel",
                           "sym_storage_offset",
                           "_size_if_not_equal",
                           "_shape_as_tensor",
                           "_debug_has_internal_overlap",
                           "cudnn_is_acceptable",
                           "_assert_tensor_metadata",
                           "_backward",
                           "data",
                           "qscheme"};
  return names;
}

// They give views without saying so in the schema.
const Names& silent_view_names() {
  static const Names names{"_unsafe_view", "unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk"};
  return names;
}

// They write a tensor's metadata, not its data.
const Names& metadata_write_names() {
  static const Names names{"as_strided_", "detach_",   "requires_grad_", "retain_grad", "set_data",   "t_",
                           "transpose_",  "swapaxes_", "swapdims_",      "squeeze_",    "unsqueeze_", "rename_"};
  return names;
}

// Composites that only call other operators: what those receive is touched there, once instead of twice.
const Names& composing_names() {
  static const Names names{"linear", "matmul", "layer_norm"};
  return names;
}

const Names& overwrite_names() {
  static const Names names{"zero_",        "fill_",       "copy_",   "normal_",    "uniform_",       "random_",
                           "exponential_", "log_normal_", "cauchy_", "geometric_", "_foreach_zero_", "_foreach_copy_"};
  return names;
}

OperatorTraits classify(const c10::OperatorHandle& op) {
  OperatorTraits traits;
  const auto& schema = op.schema();
  const std::string_view full = schema.name();
  const bool aten = full.starts_with("aten::");
  const std::string_view name = aten ? full.substr(6) : full;
  for (std::size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    if (!alias) continue;
    const std::uint64_t bit = i < 64 ? std::uint64_t{1} << i : ~std::uint64_t{0};
    (alias->isWrite() ? traits.writes : traits.views) |= bit;
  }
  const auto& returns = schema.returns();
  const bool is_view = !returns.empty() && returns[0].alias_info() && !returns[0].alias_info()->isWrite() && traits.writes == 0;
  if (!is_view) traits.views = 0;
  if (!aten) return traits;
  traits.pass_through = is_view || no_read_names().contains(name) || silent_view_names().contains(name) ||
                        metadata_write_names().contains(name) || composing_names().contains(name);
  if (name == "set_" || name == "record_stream") traits.writes = 0;  // looks at the storage, writes no data
  traits.overwrites = overwrite_names().contains(name);
  traits.casts = name == "_to_copy";
  return traits;
}

// Open addressing over the schema's address. Slots are claimed once and never freed; a forgotten operator leaves its slot with no traits.
class TraitsTable {
 public:
  const OperatorTraits& get(const c10::OperatorHandle& op) {
    const void* key = &op.schema();
    for (std::size_t probe = 0, at = start(key); probe < kSlots; ++probe, at = (at + 1) % kSlots) {
      const void* held = slots_[at].key.load(std::memory_order_acquire);
      if (held == key) {
        if (const auto* traits = slots_[at].traits.load(std::memory_order_acquire)) return *traits;
        break;
      }
      if (!held) break;
    }
    return insert(op, key);
  }

  void forget(const void* key) {
    const std::lock_guard lock(mutex_);
    for (std::size_t probe = 0, at = start(key); probe < kSlots; ++probe, at = (at + 1) % kSlots) {
      const void* held = slots_[at].key.load(std::memory_order_relaxed);
      if (held == key) slots_[at].traits.store(nullptr, std::memory_order_release);
      if (held == key || !held) return;
    }
  }

 private:
  static constexpr std::size_t kSlots = 1 << 15;  // torch has about 4,000 overloads

  static std::size_t start(const void* key) {
    return static_cast<std::size_t>((reinterpret_cast<std::uintptr_t>(key) >> 4) * 0x9E3779B97F4A7C15ULL >> 40) % kSlots;
  }

  const OperatorTraits& insert(const c10::OperatorHandle& op, const void* key) {
    const std::lock_guard lock(mutex_);
    for (std::size_t probe = 0, at = start(key); probe < kSlots; ++probe, at = (at + 1) % kSlots) {
      auto& slot = slots_[at];
      const void* held = slot.key.load(std::memory_order_relaxed);
      if (held && held != key) continue;
      if (const auto* known = slot.traits.load(std::memory_order_relaxed); held == key && known) return *known;
      kept_.push_back(std::make_unique<OperatorTraits>(classify(op)));
      slot.traits.store(kept_.back().get(), std::memory_order_release);
      slot.key.store(key, std::memory_order_release);
      return *kept_.back();
    }
    kept_.push_back(std::make_unique<OperatorTraits>(classify(op)));  // a full table costs speed, not truth
    return *kept_.back();
  }

  struct Slot {
    std::atomic<const void*> key{nullptr};
    std::atomic<const OperatorTraits*> traits{nullptr};
  };
  std::array<Slot, kSlots> slots_{};
  std::mutex mutex_;
  std::vector<std::unique_ptr<OperatorTraits>> kept_;  // handlers may hold a reference at any time: never freed
};

TraitsTable& table() {
  static auto* table = new TraitsTable;  // outlives every handler, also at exit
  return *table;
}

}  // namespace

const OperatorTraits& traits_of(const c10::OperatorHandle& op) { return table().get(op); }
void forget_traits(const c10::OperatorHandle& op) { table().forget(&op.schema()); }

}  // namespace unshard::zero
