#include "comm/fork_guard.h"

#include <sys/mman.h>
#include <unistd.h>

#include "unshard/core/error.h"

namespace unshard::comm {

namespace {
constexpr std::size_t kPage = 4096;
}

ForkGuard::ForkGuard() : owner_pid_(::getpid()) {
  void* page = ::mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) return;
  if (::madvise(page, kPage, MADV_WIPEONFORK) != 0) {
    ::munmap(page, kPage);
    return;
  }
  page_ = static_cast<volatile unsigned char*>(page);
  *page_ = 1;
}

ForkGuard::~ForkGuard() {
  if (page_) ::munmap(const_cast<unsigned char*>(page_), kPage);
}

bool ForkGuard::in_owner() const { return page_ ? *page_ == 1 : ::getpid() == owner_pid_; }

void ForkGuard::check(const char* what) const {
  if (!in_owner()) [[unlikely]]
    throw CommError(cat("[comm.", what, "] used in process ", ::getpid(), ", a fork of process ", owner_pid_,
                        " that owns this group; a forked child (a data loader's worker, say) must not use it"));
}

}  // namespace unshard::comm
