#pragma once
// Requests cut into pieces, and the two ways of carrying pieces out.
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "offload/held_file.h"

namespace unshard::offload {

struct Request;

/// One system call's worth.
struct Transfer {
  std::shared_ptr<Request> request;
  int fd = -1;  ///< which of the file's two is settled when it is taken
  bool write = false;
  std::byte* buffer = nullptr;
  std::int64_t offset = 0, bytes = 0;
};

/// What waits, in order, and what becomes of it. All threads.
class Transfers {
 public:
  using Ticket = AsyncQueue::Ticket;
  Ticket add(const AsyncFile& file, bool write, std::int64_t offset, std::int64_t bytes, std::byte* buffer, std::int64_t piece_bytes);
  void wait(Ticket ticket);
  bool done(Ticket ticket) const;
  void wait_all();
  void cancel_all();

  // ---- for carriers ----
  /// The next piece; nothing: there is none now.
  std::optional<Transfer> take();
  /// Waits for one; nothing: end().
  std::optional<Transfer> wait_for();
  /// `result` as of pread and pwrite: bytes, or minus errno. What is left of a short one goes to the front.
  void finish(Transfer&& piece, std::int64_t result);
  /// Nothing is given out any more.
  void end();

 private:
  std::optional<Transfer> take_locked();
  void settle(const std::shared_ptr<Request>& request);
  std::shared_ptr<Request> find(Ticket ticket) const;

  mutable std::mutex mutex_;
  std::condition_variable work_, changed_;
  std::deque<Transfer> waiting_;
  std::map<Ticket, std::shared_ptr<Request>> requests_;
  Ticket next_ = 1;
  bool ending_ = false;
};

/// Carries pieces out on threads of its own. Its destructor returns when none is under way.
class Carrier {
 public:
  virtual ~Carrier() = default;
  virtual void wake() = 0;  ///< there is something to take
  virtual std::string describe() const = 0;
};

/// \throws FileError  the system has no io_uring for us; the message is its reason
std::unique_ptr<Carrier> uring_carrier(Transfers& transfers, std::int64_t queue_depth);
/// `why`: why not io_uring; may be empty.
std::unique_ptr<Carrier> thread_carrier(Transfers& transfers, std::int64_t threads, const std::string& why);

struct AsyncQueue::Impl {
  AsyncOptions options;
  Transfers transfers;
  std::unique_ptr<Carrier> carrier;  ///< last: it goes first
};

}  // namespace unshard::offload
