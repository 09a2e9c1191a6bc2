#pragma once
// The process-wide table of storages that stores own: several stores live in one process, and a tensor alone must lead to its store.
#include <ATen/core/Tensor.h>

#include <memory>

#include "unshard/zero/parameter_store.h"

namespace unshard::zero {

struct Entry;

/// The entry whose parameter uses this storage now, or nullptr. Valid while its store lives.
Entry* find_entry(const c10::StorageImpl* storage);
void register_storage(const c10::StorageImpl* storage, Entry* entry);
void unregister_storage(const c10::StorageImpl* storage, const Entry* entry);

/// Counts forks up to this process: an object made under another number belongs to a parent.
unsigned process_generation();

}  // namespace unshard::zero
