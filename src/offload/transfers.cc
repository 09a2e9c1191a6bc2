#include "offload/transfers.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "unshard/core/error.h"

namespace unshard::offload {

struct Request {
  std::shared_ptr<AsyncFile::Held> file;
  std::int64_t left = 0;  ///< pieces, waiting or under way
  bool failed = false;
  std::string error;  ///< of the first piece that failed
  int code = 0;

  void fail(const Transfer& piece, const std::string& what, int of_system) {
    if (std::exchange(failed, true)) return;
    code = of_system;
    error = file_error(file->path, cat(what, " ", piece.bytes, " bytes at offset ", piece.offset), of_system).what();
  }
  void rethrow() const {
    if (failed) throw FileError(error, code);
  }
};

namespace {

bool aligned(const Transfer& piece) {
  return piece.offset % kBlock == 0 && piece.bytes % kBlock == 0 && reinterpret_cast<std::uintptr_t>(piece.buffer) % kBlock == 0;
}

}  // namespace

Transfers::Ticket Transfers::add(const AsyncFile& file, bool write, std::int64_t offset, std::int64_t bytes, std::byte* buffer,
                                 std::int64_t piece_bytes) {
  const char* what = write ? "[offload.write] " : "[offload.read] ";
  require(file.is_open(), what, "the file is closed");
  require(offset >= 0 && bytes >= 0, what, file.path(), ": ", bytes, " bytes at offset ", offset, "; neither may be negative");
  require(!write || file.held()->writable, what, file.path(), " was opened for reading");
  auto request = std::make_shared<Request>();
  request->file = file.held();
  // The tail that isn't a whole block is a piece of its own, so that the rest can go directly.
  const std::int64_t body = bytes / kBlock * kBlock;
  const std::lock_guard lock(mutex_);
  const auto put = [&](std::int64_t from, std::int64_t size) {
    waiting_.push_back({request, -1, write, buffer + from, offset + from, size});
    ++request->left;
  };
  for (std::int64_t from = 0; from < body; from += piece_bytes) put(from, std::min(piece_bytes, body - from));
  if (bytes > body) put(body, bytes - body);
  requests_.emplace(next_, std::move(request));
  work_.notify_all();
  return next_++;
}

std::shared_ptr<Request> Transfers::find(Ticket ticket) const {
  const auto at = requests_.find(ticket);
  require(at != requests_.end(), "[offload.wait] there is no ticket ", ticket, ": it never was, or was waited for already");
  return at->second;
}

void Transfers::wait(Ticket ticket) {
  std::unique_lock lock(mutex_);
  const auto request = find(ticket);
  changed_.wait(lock, [&] { return request->left == 0; });
  requests_.erase(ticket);
  request->rethrow();
}

bool Transfers::done(Ticket ticket) const {
  const std::lock_guard lock(mutex_);
  return find(ticket)->left == 0;
}

void Transfers::wait_all() {
  std::unique_lock lock(mutex_);
  std::shared_ptr<Request> failed;
  while (!requests_.empty()) {
    const auto ticket = requests_.begin()->first;
    const auto request = requests_.begin()->second;
    changed_.wait(lock, [&] { return request->left == 0; });
    requests_.erase(ticket);
    if (!failed && request->failed) failed = request;
  }
  if (failed) failed->rethrow();
}

void Transfers::cancel_all() {
  std::unique_lock lock(mutex_);
  for (const auto& piece : waiting_) {
    auto& request = *piece.request;
    request.fail(piece, "cancelled before", ECANCELED);
    --request.left;
  }
  waiting_.clear();
  changed_.notify_all();
  changed_.wait(lock, [&] { return std::ranges::all_of(requests_, [](const auto& each) { return each.second->left == 0; }); });
}

std::optional<Transfer> Transfers::take_locked() {
  while (!waiting_.empty() && !ending_) {
    Transfer piece = std::move(waiting_.front());
    waiting_.pop_front();
    if (piece.request->failed) {  // another piece failed: these are of no use
      settle(piece.request);
      continue;
    }
    const auto& file = *piece.request->file;
    piece.fd = file.takes_direct() && aligned(piece) ? file.direct : file.cached;
    return piece;
  }
  return std::nullopt;
}

std::optional<Transfer> Transfers::take() {
  const std::lock_guard lock(mutex_);
  return take_locked();
}

std::optional<Transfer> Transfers::wait_for() {
  std::unique_lock lock(mutex_);
  for (;;) {
    if (auto piece = take_locked()) return piece;
    if (ending_) return std::nullopt;
    work_.wait(lock);
  }
}

void Transfers::settle(const std::shared_ptr<Request>& request) {
  if (--request->left == 0) changed_.notify_all();
}

void Transfers::finish(Transfer&& piece, std::int64_t result) {
  const std::lock_guard lock(mutex_);
  auto& file = *piece.request->file;
  const bool direct = piece.fd == file.direct;
  if (result == piece.bytes) return settle(piece.request);
  if (result == -EINVAL && direct) file.transfer_refused = true;
  const bool again = result == -EINTR || result == -EAGAIN || (result == -EINVAL && direct);
  if (!again && result <= 0) {
    const auto what = result < 0 ? (piece.write ? "can't write" : "can't read") : piece.write ? "the system didn't write" : "ends before";
    piece.request->fail(piece, what, static_cast<int>(-result));
    return settle(piece.request);
  }
  if (result > 0) {
    piece.buffer += result;
    piece.offset += result;
    piece.bytes -= result;
  }
  if (ending_) {
    piece.request->fail(piece, "cancelled before", ECANCELED);
    return settle(piece.request);
  }
  waiting_.push_front(std::move(piece));
  work_.notify_one();
}

void Transfers::end() {
  const std::lock_guard lock(mutex_);
  ending_ = true;
  work_.notify_all();
}

}  // namespace unshard::offload
