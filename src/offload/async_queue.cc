#include <utility>

#include "offload/transfers.h"
#include "unshard/core/error.h"

namespace unshard::offload {
namespace {

std::unique_ptr<Carrier> carrier_for(Transfers& transfers, const AsyncOptions& options) {
  if (options.method == Method::threads) return thread_carrier(transfers, options.threads, "");
  try {
    return uring_carrier(transfers, options.queue_depth);
  } catch (const FileError& error) {
    if (options.method == Method::uring) throw;
    return thread_carrier(transfers, options.threads, error.what());
  }
}

}  // namespace

void AsyncOptions::validate() const {
  const auto check = [](bool ok, const char* name, std::int64_t value, const char* accepted) {
    require(ok, "[offload.queue] ", name, " is ", value, "; accepted: ", accepted);
  };
  check(queue_depth >= 1 && queue_depth <= 4096, "queue_depth", queue_depth, "1 to 4096");
  check(piece_bytes >= kBlock && piece_bytes % kBlock == 0 && piece_bytes <= (1 << 30), "piece_bytes", piece_bytes,
        "multiples of 4096 up to 2^30");
  check(threads >= 1 && threads <= 256, "threads", threads, "1 to 256");
}

AsyncQueue::AsyncQueue(const AsyncOptions& options) : impl_(std::make_unique<Impl>()) {
  options.validate();
  impl_->options = options;
  impl_->carrier = carrier_for(impl_->transfers, options);
}

AsyncQueue::AsyncQueue(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

AsyncQueue::~AsyncQueue() {
  impl_->transfers.cancel_all();
  impl_->transfers.end();
}

AsyncQueue::Ticket AsyncQueue::read(const AsyncFile& file, std::int64_t offset, std::int64_t bytes, void* buffer) {
  const auto ticket = impl_->transfers.add(file, false, offset, bytes, static_cast<std::byte*>(buffer), impl_->options.piece_bytes);
  impl_->carrier->wake();
  return ticket;
}

AsyncQueue::Ticket AsyncQueue::write(const AsyncFile& file, std::int64_t offset, std::int64_t bytes, const void* buffer) {
  auto* from = static_cast<std::byte*>(const_cast<void*>(buffer));  // only read
  const auto ticket = impl_->transfers.add(file, true, offset, bytes, from, impl_->options.piece_bytes);
  impl_->carrier->wake();
  return ticket;
}

void AsyncQueue::wait(Ticket ticket) { impl_->transfers.wait(ticket); }
bool AsyncQueue::done(Ticket ticket) const { return impl_->transfers.done(ticket); }
void AsyncQueue::wait_all() { impl_->transfers.wait_all(); }
void AsyncQueue::cancel_all() { impl_->transfers.cancel_all(); }

std::string AsyncQueue::describe() const {
  return cat(impl_->carrier->describe(), ", pieces of ", impl_->options.piece_bytes >> 10, " KiB");
}

}  // namespace unshard::offload
