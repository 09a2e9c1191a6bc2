#include "zero/derived.h"

#include <ATen/autocast_mode.h>
#include <ATen/ops/_to_copy.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <stdexcept>

#include "unshard/core/error.h"
#include "zero/entry.h"
#include "zero/key.h"
#include "zero/raw_tensor.h"

namespace unshard::zero {

// Owned by the context of its storage's DataPtr; dies with the storage.
class DerivedCast final : public TouchTarget {
 public:
  DerivedCast(Entry& source, const at::Tensor& result, std::shared_ptr<DerivedSet> set)
      : source_(source),
        set_(std::move(set)),
        storage_(result.storage().unsafeGetStorageImpl()),
        dtype_(result.scalar_type()),
        version_(source.parameter._version()) {
    // The first use follows at once: the bytes stay until then.
    value_ = flat_holder(storage_->set_data_ptr(pointer(storage_->mutable_data())));
    original_allocator = storage_->allocator();
    storage_->set_allocator(this);
    storage_->set_resizable(false);
    set_unreadable_message(*storage_, cat("a cast of parameter '", source.info.name, "' is partitioned and only readable by operators"));
    set_->insert(this);
  }
  ~DerivedCast() override { set_->erase(this); }

  Pinned pin(Access access) override {
    std::unique_lock lock(mutex_);
    filled_.wait(lock, [this] { return !filling_; });
    if (!value_ && !detached_) fill(lock);
    if (access != Access::read && !detached_) detach_locked();  // the user changes it: now it is a value of its own
    if (pins_++ == 0 && !detached_) make_readable(*storage_);
    return {};
  }

  void unpin(bool) noexcept override {
    const std::lock_guard lock(mutex_);
    if (--pins_ > 0 || detached_) return;
    drop();
  }

  void finish_lockstep_write() override {}
  bool lives_in_storage() const override { return true; }
  std::int64_t whole_numel() const override { return source_.info.layout.numel; }

  void detach(bool readable) {
    std::unique_lock lock(mutex_);
    if (detached_) return;
    if (!value_ && (!readable || stale())) {
      if (stale()) set_unreadable_message(*storage_, stale_message());
      restore_allocator();
      detached_ = true;
      return;
    }
    if (!value_) fill(lock);
    detach_locked();
  }

 private:
  static void died(void* context) { delete static_cast<DerivedCast*>(context); }
  c10::DataPtr pointer(void* data) { return {data, this, &died, storage_->device()}; }
  static std::shared_ptr<void> flat_holder(c10::DataPtr old) { return std::make_shared<c10::DataPtr>(std::move(old)); }

  void point_at(void* data) {
    auto old = storage_->set_data_ptr(pointer(data));
    old.release_context();  // it is this object, which lives on in the new pointer
  }

  // The bytes can't be made again: what would be cast now is another value.
  bool stale() const { return static_cast<std::int64_t>(source_.parameter._version()) != version_; }
  std::string stale_message() const {
    return cat("one of the variables needed for gradient computation has been modified by an inplace operation: parameter '",
               source_.info.name, "' was updated after autocast cast it (version ", source_.parameter._version(), ", expected ", version_,
               ")");
  }

  void fill(std::unique_lock<std::mutex>& lock) {
    if (stale()) throw std::runtime_error(stale_message());
    filling_ = true;
    lock.unlock();
    at::Tensor cast;
    const auto finish = [&] {
      lock.lock();
      filling_ = false;
      filled_.notify_all();
    };
    try {
      source_.pin(Access::read);
      try {
        const Unobserved quiet;
        cast = at::_to_copy(flat_view_of_source(), c10::TensorOptions().dtype(dtype_));
      } catch (...) {
        source_.unpin(false);
        throw;
      }
      source_.unpin(false);
    } catch (...) {
      finish();
      throw;
    }
    finish();
    value_ = std::make_shared<at::Tensor>(cast);
    point_at(cast.mutable_data_ptr());
  }

  at::Tensor flat_view_of_source() const {
    return tensor_over(source_.storage->mutable_data(), source_.info.layout.numel, source_.info.dtype, source_.storage->device(), nullptr);
  }

  void drop() {
    point_at(nullptr);
    make_unreadable(*storage_);
    value_.reset();
  }

  void restore_allocator() {
    storage_->set_allocator(original_allocator);
    storage_->set_resizable(false);
  }

  // Plain from now on; the bytes stay in value_, which lives as long as the storage.
  void detach_locked() {
    clear_unreadable_message(*storage_);
    restore_allocator();
    detached_ = true;
  }

  Entry& source_;
  std::shared_ptr<DerivedSet> set_;
  c10::StorageImpl* storage_;
  c10::ScalarType dtype_;
  std::int64_t version_;

  std::mutex mutex_;
  std::condition_variable filled_;
  std::shared_ptr<void> value_;  // what holds the bytes while they are here
  bool filling_ = false, detached_ = false;
  int pins_ = 0;
};

void DerivedSet::insert(DerivedCast* cast) {
  const std::lock_guard lock(mutex_);
  casts_.insert(cast);
}

void DerivedSet::erase(DerivedCast* cast) {
  const std::lock_guard lock(mutex_);
  casts_.erase(cast);
}

void DerivedSet::detach_all(bool readable) {
  const std::lock_guard lock(mutex_);
  for (auto* cast : casts_) cast->detach(readable);
}

std::size_t DerivedSet::size() const {
  const std::lock_guard lock(mutex_);
  return casts_.size();
}

namespace {

// Inside an autocast kernel autocast's own key is excluded, though its region goes on. A cast by the user (a snapshot that must outlive
// updates) in a region where autocast is on does not look so.
bool made_by_autocast(const at::Tensor& result) {
  const auto device = result.device().type();
  if (!at::autocast::is_autocast_available(device)) return false;
  at::autocast::increment_nesting();
  const bool in_region = at::autocast::decrement_nesting() > 0;
  return in_region && !at::autocast::is_autocast_enabled(device) && result.scalar_type() == at::autocast::get_autocast_dtype(device);
}

}  // namespace

void derive_cast(Entry& source, const at::Tensor& result, const std::shared_ptr<DerivedSet>& set) {
  const auto device = result.device().type();
  if (!result.requires_grad() || !made_by_autocast(result)) return;
  if (!result.has_storage() || result.scalar_type() == source.info.dtype || device != source.storage->device_type()) return;
  if (result.key_set().has(c10::DispatchKey::Python) || source.parameter.is_inference() || result.is_inference()) return;
  const auto& storage = result.storage();
  if (result.sizes() != source.info.sizes || result.strides() != source.strides || result.storage_offset() != 0 ||
      storage.nbytes() != static_cast<std::size_t>(result.numel()) * result.element_size()) {
    return;
  }
  new DerivedCast(source, result, set);  // owned by the storage
  add_touch_keys(result);
}

}  // namespace unshard::zero
