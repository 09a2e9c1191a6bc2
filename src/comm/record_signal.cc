#include "comm/record_signal.h"

#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>

namespace unshard::comm {

namespace {

constexpr int kSignal = SIGUSR1;

// [Note: state of the process] A signal handler is the process's, and can reach nothing but globals. What it may be using just now is never
// freed or closed: the event and the handlers that were there before.
std::atomic<int> event_fd{-1};
std::atomic<bool> taken{false};
std::atomic<pid_t> owner{0};  // a forked child has a copy of the handler, and must not speak for its parent
std::atomic<struct sigaction*> before{nullptr};

void on_signal(int number, siginfo_t* info, void* context) {
  const int saved = errno;
  const int fd = event_fd.load(std::memory_order_acquire);
  if (fd >= 0 && owner.load(std::memory_order_relaxed) == ::getpid()) {
    const std::uint64_t one = 1;
    (void)!::write(fd, &one, sizeof(one));
  }
  const auto* earlier = before.load(std::memory_order_acquire);
  if (earlier && (earlier->sa_flags & SA_SIGINFO)) {
    earlier->sa_sigaction(number, info, context);
  } else if (earlier && earlier->sa_handler != SIG_DFL && earlier->sa_handler != SIG_IGN) {
    earlier->sa_handler(number);
  }
  errno = saved;
}

bool is_ours(const struct sigaction& action) { return (action.sa_flags & SA_SIGINFO) && action.sa_sigaction == &on_signal; }

bool is_a_handler(const struct sigaction& action) {
  return (action.sa_flags & SA_SIGINFO) || (action.sa_handler != SIG_DFL && action.sa_handler != SIG_IGN);
}

void install() {
  struct sigaction action {};
  action.sa_sigaction = &on_signal;
  action.sa_flags = SA_SIGINFO | SA_RESTART | SA_ONSTACK;
  ::sigemptyset(&action.sa_mask);
  ::sigaction(kSignal, &action, nullptr);
}

}  // namespace

RecordSignal::RecordSignal() {
  if (taken.exchange(true)) return;
  if (event_fd.load() < 0) event_fd.store(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  listens_ = event_fd.load() >= 0;
  owner.store(::getpid());
  struct sigaction now {};
  ::sigaction(kSignal, nullptr, &now);
  if (!listens_ || is_ours(now)) return;
  before.store(new struct sigaction(now), std::memory_order_release);
  install();
}

// Our handler stays: others may have put theirs before it, and a signal that is on its way must not end the process.
RecordSignal::~RecordSignal() {
  if (listens_) taken.store(false);
}

int RecordSignal::fd() const { return listens_ ? event_fd.load() : -1; }

std::uint64_t RecordSignal::take() {
  std::uint64_t count = 0;
  return listens_ && ::read(fd(), &count, sizeof(count)) == static_cast<ssize_t>(sizeof(count)) ? count : 0;
}

void RecordSignal::adopt() {
  struct sigaction now {};
  if (!listens_ || ::sigaction(kSignal, nullptr, &now) != 0 || is_ours(now) || !is_a_handler(now)) return;
  before.store(new struct sigaction(now), std::memory_order_release);
  install();
}

}  // namespace unshard::comm
