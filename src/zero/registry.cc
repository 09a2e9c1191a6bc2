#include "zero/registry.h"

#include <pthread.h>

#include <atomic>
#include <mutex>
#include <unordered_map>

#include "zero/entry.h"

namespace unshard::zero {
namespace {

struct Registry {
  std::mutex mutex;
  std::unordered_map<const c10::StorageImpl*, Entry*> entries;
};
Registry& registry() {
  static auto* registry = new Registry;  // storages may die at exit, after static destructors
  return *registry;
}

std::atomic<unsigned> generation{0};
const int at_fork = pthread_atfork(nullptr, nullptr, [] { generation.fetch_add(1, std::memory_order_relaxed); });

}  // namespace

Entry* find_entry(const c10::StorageImpl* storage) {
  auto& table = registry();
  const std::lock_guard lock(table.mutex);
  const auto found = table.entries.find(storage);
  if (found == table.entries.end()) return nullptr;
  // A parameter kept whole may have been given another storage; the address then means nothing.
  if (!found->second->storage && found->second->parameter.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl() != storage)
    return nullptr;
  return found->second;
}

void register_storage(const c10::StorageImpl* storage, Entry* entry) {
  auto& table = registry();
  const std::lock_guard lock(table.mutex);
  table.entries[storage] = entry;
}

void unregister_storage(const c10::StorageImpl* storage, const Entry* entry) {
  auto& table = registry();
  const std::lock_guard lock(table.mutex);
  const auto found = table.entries.find(storage);
  if (found != table.entries.end() && found->second == entry) table.entries.erase(found);
}

unsigned process_generation() {
  (void)at_fork;
  return generation.load(std::memory_order_relaxed);
}

}  // namespace unshard::zero
