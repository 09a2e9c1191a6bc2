#include "zero/key.h"

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

namespace unshard::zero {
namespace {

constexpr c10::DispatchKeySet kTouchKeys({c10::DispatchKey::DeferredInit, c10::DispatchKey::CustomRNGKeyId});

// A derived class may name a protected member; the pointer it forms then applies to any TensorImpl. Legal C++, no layout assumed.
struct KeySetAccess : c10::TensorImpl {
  static constexpr auto pointer() { return &KeySetAccess::key_set_; }
};

// An explicit instantiation may name private members; the friend it defines hands the pointer out.
template <class Tag, auto Member>
struct Reveal {
  friend constexpr auto member(Tag) { return Member; }
};
struct ThrowOnRead {
  friend constexpr auto member(ThrowOnRead);
};
struct HasWriteCheck {
  friend constexpr auto member(HasWriteCheck);
};
template struct Reveal<ThrowOnRead, &c10::StorageImpl::throw_on_immutable_data_ptr_>;
template struct Reveal<HasWriteCheck, &c10::StorageImpl::has_mutable_data_ptr_check_>;

}  // namespace

void add_touch_keys(const at::Tensor& tensor) {
  auto& keys = tensor.unsafeGetTensorImpl()->*KeySetAccess::pointer();
  keys = keys | kTouchKeys;
}

void remove_touch_keys(const at::Tensor& tensor) {
  auto& keys = tensor.unsafeGetTensorImpl()->*KeySetAccess::pointer();
  keys = keys - kTouchKeys;
}

bool has_touch_keys(const at::Tensor& tensor) { return tensor.key_set().has_all(kTouchKeys); }

void make_unreadable(c10::StorageImpl& storage) noexcept {
  storage.*member(ThrowOnRead{}) = true;
  storage.*member(HasWriteCheck{}) = true;
}

void make_readable(c10::StorageImpl& storage) noexcept {
  storage.*member(ThrowOnRead{}) = false;
  storage.*member(HasWriteCheck{}) = false;
}

bool is_readable(const c10::StorageImpl& storage) noexcept { return !(storage.*member(ThrowOnRead{})); }

void set_unreadable_message(c10::StorageImpl& storage, std::string message) {
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(std::move(message));
}

void clear_unreadable_message(c10::StorageImpl& storage) { storage.clear_data_ptr_access_error_msg_(); }

}  // namespace unshard::zero
