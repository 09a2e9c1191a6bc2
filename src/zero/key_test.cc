// Fails when a new torch moves the key set or the access flags that touch relies on.
#include "zero/key.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <c10/core/StorageImpl.h>
#include <gtest/gtest.h>

namespace unshard::zero {
namespace {

TEST(Key, IsInheritedByViewsAndNotByResults) {
  auto t = at::ones({4, 4});
  EXPECT_FALSE(has_touch_keys(t));
  add_touch_keys(t);
  EXPECT_TRUE(has_touch_keys(t));
  EXPECT_TRUE(t.key_set().has(c10::DispatchKey::DeferredInit));
  remove_touch_keys(t);
  const auto view_before = t.t();
  add_touch_keys(t);
  EXPECT_FALSE(has_touch_keys(view_before));
  // The plain fallthrough of an operator table would loop or fail here if the keys changed what the tensor is.
  EXPECT_TRUE(t.is_contiguous());
  EXPECT_EQ(t.scalar_type(), at::kFloat);
  remove_touch_keys(t);
  EXPECT_FALSE(has_touch_keys(t));
  EXPECT_FALSE(t.key_set().has(c10::DispatchKey::DeferredInit));
}

TEST(Key, UnreadableStorageThrowsItsMessageOnEveryRawAccess) {
  auto t = at::ones({3});
  auto& storage = *t.storage().unsafeGetStorageImpl();
  set_unreadable_message(storage, "parameter 'blocks.0.weight' rests");
  for (int round = 0; round < 2; ++round) {
    EXPECT_FALSE(is_readable(storage));
    for (const auto& access :
         {std::function<void()>([&] { (void)t.data_ptr(); }), std::function<void()>([&] { (void)t.const_data_ptr(); }),
          std::function<void()>([&] { (void)t.mutable_data_ptr(); }), std::function<void()>([&] { (void)storage.data(); }),
          std::function<void()>([&] { storage.mutable_data(); })}) {
      try {
        access();
        ADD_FAILURE() << "raw access passed";
      } catch (const std::exception& error) {
        EXPECT_NE(std::string(error.what()).find("blocks.0.weight"), std::string::npos) << error.what();
      }
    }
    make_readable(storage);
    EXPECT_TRUE(is_readable(storage));
    EXPECT_EQ(*t.const_data_ptr<float>(), 1.0F);
    EXPECT_EQ(t.mutable_data_ptr<float>()[2], 1.0F);
    make_unreadable(storage);
  }
  clear_unreadable_message(storage);
  EXPECT_EQ(*t.const_data_ptr<float>(), 1.0F);
}

}  // namespace
}  // namespace unshard::zero
