#include "zero/touch.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/SmallVector.h>

#include <atomic>
#include <deque>
#include <mutex>
#include <stdexcept>

#include "unshard/core/error.h"
#include "zero/operator_traits.h"
#include "zero/touch_target.h"

namespace unshard::zero {
namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;

constexpr auto kUpper = DispatchKey::DeferredInit;  // above autograd, autocast and functorch: operators arrive whole
constexpr auto kNet = DispatchKey::CustomRNGKeyId;  // below Python, above the backends: where the upper key is excluded

// Pins of one operator. Unpins whatever happened; an operator that threw abandons copies that never had the old value.
class PinSet {
 public:
  PinSet() = default;
  PinSet(const PinSet&) = delete;
  PinSet& operator=(const PinSet&) = delete;
  ~PinSet() {
    for (std::size_t i = pinned_; i-- > 0;) items_[i].target->unpin(!succeeded_ && items_[i].pinned.fresh_copy);
  }

  bool empty() const { return items_.empty(); }

  void add(const at::Tensor& tensor, const OperatorTraits& traits, std::size_t argument) {
    const bool written = traits.is_written(argument);
    auto* storage = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
    if (!storage) return;
    auto* target = target_of(*storage);
    if (!target) return;  // plain again (its store gave it back), or a storage that raises by name when it is read
    auto access = written ? Access::write : Access::read;
    if (written && traits.overwrites && tensor.numel() == target->whole_numel() && tensor.is_non_overlapping_and_dense()) {
      access = Access::overwrite;
    }
    auto& item = items_.emplace_back();
    item.target = target;
    item.access = access;
    if (traits.casts) exact_ = target->is_exactly(tensor);
    if (target->lives_in_storage()) item.storage = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage);
  }

  void pin() {
    for (; pinned_ < items_.size(); ++pinned_) {
      auto& item = items_[pinned_];
      if (item.access == Access::overwrite && is_shared(pinned_)) item.access = Access::write;
      item.pinned = item.target->pin(item.access);
    }
  }

  void succeed() {
    succeeded_ = true;
    for (auto& item : items_) {
      if (item.pinned.lockstep_write) item.target->finish_lockstep_write();
    }
  }

  /// The parameter when the operator received it alone and as it is, not a view of it.
  TouchTarget* only() const { return items_.size() == 1 && exact_ ? items_[0].target : nullptr; }

 private:
  bool is_shared(std::size_t index) const {
    for (std::size_t i = 0; i < items_.size(); ++i) {
      if (i != index && items_[i].target == items_[index].target) return true;
    }
    return false;
  }

  struct Item {
    TouchTarget* target = nullptr;
    Access access = Access::read;
    Pinned pinned;
    c10::intrusive_ptr<c10::StorageImpl> storage;  // only for targets that die with it
  };
  c10::SmallVector<Item, 4> items_;
  std::size_t pinned_ = 0;
  bool succeeded_ = false;
  bool exact_ = false;
};

bool in_fake_mode() {
  return c10::impl::TorchDispatchModeTLS::any_modes_set() &&
         c10::impl::TorchDispatchModeTLS::get_mode(c10::impl::TorchDispatchModeKey::FAKE).has_value();
}

template <DispatchKey key>
void collect(const OperatorTraits& traits, const c10::OperatorHandle& op, const torch::jit::Stack& stack, PinSet& pins) {
  const std::size_t count = op.schema().arguments().size();
  const auto* arguments = stack.data() + (stack.size() - count);
  for (std::size_t i = 0; i < count; ++i) {
    const auto& value = arguments[i];
    if (value.isTensor()) {
      const auto& tensor = value.toTensor();
      if (tensor.key_set().has(key) && !traits.is_viewed(i)) pins.add(tensor, traits, i);
    } else if (value.isList()) {
      for (const auto& element : value.toListRef()) {
        if (!element.isTensor()) {
          if (element.isNone()) continue;  // an optional tensor that is absent
          break;                           // a list of something else
        }
        const auto& tensor = element.toTensor();
        if (tensor.key_set().has(key) && !traits.is_viewed(i)) pins.add(tensor, traits, i);
      }
    }
  }
}

void register_late_operators();
std::atomic<bool> late_operators{false};  // operators were defined after the net was cast

// [Note: two keys] The upper handler sees operators before autograd. Inside __torch_dispatch__ everything above Python is excluded by
// TLS, so a parameter inside a subclass (DTensor) or captured by a mode would not be touched: the lower handler is the net for that. The
// upper one masks both keys out of its redispatch; the lower one runs only where the upper did not, or where a kernel calls back into at::.
template <DispatchKey key>
void on_touch(const c10::OperatorHandle& op, DispatchKeySet keys, torch::jit::Stack* stack) {
  if (late_operators.load(std::memory_order_relaxed)) [[unlikely]]
    register_late_operators();
  const auto below = (keys & DispatchKeySet(DispatchKeySet::FULL_AFTER, key)).remove(kNet);
  const auto& traits = traits_of(op);
  if (traits.pass_through || in_fake_mode()) return op.redispatchBoxed(below, stack);
  PinSet pins;
  collect<key>(traits, op, *stack, pins);
  if (pins.empty()) return op.redispatchBoxed(below, stack);
  pins.pin();
  op.redispatchBoxed(below, stack);
  pins.succeed();
  if (key == kUpper && traits.casts && pins.only() && stack->back().isTensor()) pins.only()->derive(stack->back().toTensor());
}

bool is_composite(const c10::OperatorHandle& op) {
  return op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd) ||
         op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutogradNonFunctional) ||
         op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd);
}

// Registrations last as long as the process: the dispatcher may call a handler at any time.
struct Installed {
  std::mutex mutex;
  std::deque<c10::RegistrationHandleRAII> handles;
  std::deque<c10::OperatorName> late;
  int net_count = 0;
};
Installed& installed() {
  static auto* state = new Installed;
  return *state;
}

// [Note: fallthrough] Operators that read no data need no handler: the dispatcher skips both keys for them, at no cost.
void let_through(Installed& state, const c10::OperatorHandle& op) {
  for (const auto key : {kUpper, kNet}) {
    if (op.hasKernelForDispatchKey(key)) continue;
    state.handles.push_back(c10::Dispatcher::singleton().registerImpl(op.operator_name(), key, c10::KernelFunction::makeFallthrough(),
                                                                      std::nullopt, nullptr, "unshard: reads no data"));
  }
}

// Composite kernels are installed at the net's key too and win over the fallback; such operators get the handler by name.
void cast_net_over(Installed& state, const c10::OperatorName& name) {
  auto& dispatcher = c10::Dispatcher::singleton();
  const auto op = dispatcher.findOp(name);
  if (!op || !op->hasSchema()) return;
  if (traits_of(*op).pass_through) return let_through(state, *op);
  if (!is_composite(*op) || op->hasKernelForDispatchKey(kNet)) return;
  state.handles.push_back(dispatcher.registerImpl(name, kNet, c10::KernelFunction::makeFromBoxedFunction<&on_touch<kNet>>(), std::nullopt,
                                                  nullptr, "unshard: touch, lower key"));
  ++state.net_count;
}

// Called under the dispatcher's lock: only takes notes.
class NewOperators : public c10::OpRegistrationListener {
 public:
  void onOperatorRegistered(const c10::OperatorHandle& op) override {
    const std::lock_guard lock(mutex_);
    names_.push_back(op.operator_name());
    late_operators.store(true, std::memory_order_relaxed);
  }
  void onOperatorDeregistered(const c10::OperatorHandle& op) override { forget_traits(op); }

  std::deque<c10::OperatorName> take() {
    const std::lock_guard lock(mutex_);
    late_operators.store(false, std::memory_order_relaxed);
    return std::exchange(names_, {});
  }
  static NewOperators*& instance() {
    static NewOperators* listener = nullptr;  // owned by the dispatcher
    return listener;
  }

 private:
  std::mutex mutex_;
  std::deque<c10::OperatorName> names_;
};

void register_late_operators() {
  auto& state = installed();
  const std::lock_guard lock(state.mutex);
  if (!NewOperators::instance()) return;
  for (const auto& name : NewOperators::instance()->take()) cast_net_over(state, name);
}

c10::RegistrationHandleRAII register_fallback(DispatchKey key, c10::KernelFunction kernel) {
  auto& dispatcher = c10::Dispatcher::singleton();
  if (dispatcher.hasBackendFallbackForDispatchKey(key)) {
    throw std::runtime_error(cat("[zero.install_touch] another library in this process (torchdistX?) already handles torch's dispatch key ",
                                 c10::toString(key), ", which Unshard needs; don't import that library in this process"));
  }
  return dispatcher.registerFallback(key, std::move(kernel), "unshard: touch");
}

}  // namespace

void TouchTarget::tag(void*) {}

void install_touch() {
  auto& state = installed();
  {
    const std::lock_guard lock(state.mutex);
    if (!state.handles.empty()) return;
    auto upper = register_fallback(kUpper, c10::KernelFunction::makeFromBoxedFunction<&on_touch<kUpper>>());
    auto net = register_fallback(kNet, c10::KernelFunction::makeFromBoxedFunction<&on_touch<kNet>>());
    state.handles.push_back(std::move(upper));
    state.handles.push_back(std::move(net));
    auto listener = std::make_unique<NewOperators>();
    NewOperators::instance() = listener.get();
    state.handles.push_back(c10::Dispatcher::singleton().addRegistrationListener(std::move(listener)));  // reports those that exist too
  }
  register_late_operators();
}

int net_operators() {
  auto& state = installed();
  const std::lock_guard lock(state.mutex);
  return state.net_count;
}

}  // namespace unshard::zero
