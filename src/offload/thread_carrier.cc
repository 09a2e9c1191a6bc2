// Pieces by pread and pwrite on a few threads: where io_uring isn't.
#include <unistd.h>

#include <cerrno>
#include <thread>
#include <vector>

#include "offload/transfers.h"
#include "unshard/core/error.h"

namespace unshard::offload {
namespace {

class ThreadCarrier : public Carrier {
 public:
  ThreadCarrier(Transfers& transfers, std::int64_t threads, std::string why) : transfers_(transfers), why_(std::move(why)) {
    try {
      for (std::int64_t i = 0; i < threads; ++i) threads_.emplace_back([this] { carry(); });
    } catch (...) {  // the system has no more threads
      end();
      throw;
    }
  }
  ~ThreadCarrier() override { end(); }
  void wake() override {}  // the list's condition has woken them
  std::string describe() const override {
    return cat(threads_.size(), " threads", why_.empty() ? "" : " (io_uring isn't permitted here: ", why_, why_.empty() ? "" : ")");
  }

 private:
  void end() {
    transfers_.end();
    for (auto& thread : threads_) thread.join();
  }
  void carry() {
    while (auto piece = transfers_.wait_for()) {
      const auto size = static_cast<std::size_t>(piece->bytes);
      const auto got =
          piece->write ? ::pwrite(piece->fd, piece->buffer, size, piece->offset) : ::pread(piece->fd, piece->buffer, size, piece->offset);
      transfers_.finish(std::move(*piece), got < 0 ? -errno : got);
    }
  }

  Transfers& transfers_;
  const std::string why_;
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<Carrier> thread_carrier(Transfers& transfers, std::int64_t threads, const std::string& why) {
  return std::make_unique<ThreadCarrier>(transfers, threads, why);
}

}  // namespace unshard::offload
