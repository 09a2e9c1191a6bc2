#pragma once
// The two places where touch reaches below torch's public interface: a tensor's dispatch key set, and a storage's two access flags.
// A new torch that moves them fails to compile here, or fails key_test.
#include <string>

namespace at {
class Tensor;
}
namespace c10 {
struct StorageImpl;
}

namespace unshard::zero {

/// Every operator that receives the tensor, or a view made from it, enters the touch handler.
/// Two keys: the out-of-core key (above autograd) and the net below Python for places where the upper is excluded.
void add_touch_keys(const at::Tensor& tensor);
void remove_touch_keys(const at::Tensor& tensor);
/// Both keys are set.
bool has_touch_keys(const at::Tensor& tensor);

/// Two byte stores: data_ptr() of every tensor on this storage throws the message that set_unreadable_message gave.
void make_unreadable(c10::StorageImpl& storage) noexcept;
void make_readable(c10::StorageImpl& storage) noexcept;
bool is_readable(const c10::StorageImpl& storage) noexcept;
/// Sets the message and makes the storage unreadable. Allocates; once per parameter.
void set_unreadable_message(c10::StorageImpl& storage, std::string message);
/// Readable, message dropped.
void clear_unreadable_message(c10::StorageImpl& storage);

}  // namespace unshard::zero
