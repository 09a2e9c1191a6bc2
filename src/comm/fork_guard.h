#pragma once
// Tells a forked child from the process that made the object, without a system call.
#include <cstddef>

namespace unshard::comm {

/// A page that the kernel wipes in children (MADV_WIPEONFORK); where that isn't supported, the process id is compared.
/// A child (a data loader's worker) shares the control block's memory: what it wrote there would look like the parent's doing.
class ForkGuard {
 public:
  ForkGuard();
  ~ForkGuard();
  ForkGuard(const ForkGuard&) = delete;
  ForkGuard& operator=(const ForkGuard&) = delete;

  bool in_owner() const;
  /// \throws CommError in a forked child.
  void check(const char* what) const;

 private:
  volatile unsigned char* page_ = nullptr;  ///< null: compare owner_pid_
  int owner_pid_ = 0;
};

}  // namespace unshard::comm
