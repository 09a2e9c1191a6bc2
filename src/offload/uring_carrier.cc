// Pieces by io_uring: one thread hands them to the kernel and takes back what is done, asleep in between.
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <thread>
#include <vector>

#include "offload/ring.h"
#include "offload/transfers.h"
#include "unshard/core/error.h"

namespace unshard::offload {
namespace {

/// [Note: one thread owns the ring] The kernel cancels what a thread has submitted when that thread ends, so callers' threads don't
/// submit: they put a piece in the list and write to `wake_`, whose read is always under way in the ring.
/// Buffers aren't registered: that counts against RLIMIT_MEMLOCK, 8 MB in many containers, and huge pages make pinning cheap.
class UringCarrier : public Carrier {
 public:
  UringCarrier(Transfers& transfers, std::int64_t depth)
      : transfers_(transfers), depth_(depth), ring_(static_cast<unsigned>(depth) + 1), slots_(static_cast<std::size_t>(depth)) {
    wake_ = ::eventfd(0, EFD_CLOEXEC);
    if (wake_ < 0) throw FileError(cat("eventfd: ", std::strerror(errno)), errno);
    for (std::size_t i = 0; i < slots_.size(); ++i) free_.push_back(i);
    thread_ = std::thread([this] { carry(); });
  }
  ~UringCarrier() override {
    transfers_.end();
    ending_ = true;
    wake();
    thread_.join();
    ::close(wake_);
  }
  void wake() override {
    const std::uint64_t one = 1;
    while (::write(wake_, &one, sizeof one) < 0 && errno == EINTR) {
    }
  }
  std::string describe() const override { return cat("io_uring, ", depth_, " at once"); }

 private:
  static constexpr std::uint64_t kWake = ~std::uint64_t{0};

  void carry() {
    listen();
    while (!ending_ || free_.size() < slots_.size()) {
      while (!free_.empty()) {
        auto piece = transfers_.take();
        if (!piece) break;
        begin(std::move(*piece));
      }
      const int error = ring_.submit_and_wait();
      if (error != 0 && error != EINTR && error != EAGAIN && error != EBUSY) return give_up(error);
      std::uint64_t slot = 0;
      for (std::int32_t result = 0; ring_.reap(slot, result);) {
        if (slot == kWake) {
          listen();
          continue;
        }
        transfers_.finish(std::move(slots_[slot]), result);
        slots_[slot] = {};
        free_.push_back(slot);
      }
    }
  }

  void listen() {
    auto& entry = ring_.next();
    entry.opcode = IORING_OP_READ;
    entry.fd = wake_;
    entry.addr = reinterpret_cast<std::uint64_t>(&wakes_);
    entry.len = sizeof wakes_;
    entry.user_data = kWake;
  }

  void begin(Transfer&& piece) {
    const auto slot = free_.back();
    free_.pop_back();
    auto& entry = ring_.next();
    entry.opcode = piece.write ? IORING_OP_WRITE : IORING_OP_READ;
    entry.fd = piece.fd;
    entry.addr = reinterpret_cast<std::uint64_t>(piece.buffer);
    entry.len = static_cast<std::uint32_t>(piece.bytes);
    entry.off = static_cast<std::uint64_t>(piece.offset);
    entry.user_data = slot;
    slots_[slot] = std::move(piece);
  }

  /// The ring itself fails, which no kernel is known to do: nobody waits for ever.
  void give_up(int error) {
    for (auto& piece : slots_)
      if (piece.request) transfers_.finish(std::move(piece), -error);
    while (auto piece = transfers_.wait_for()) transfers_.finish(std::move(*piece), -error);
  }

  Transfers& transfers_;
  const std::int64_t depth_;
  Ring ring_;
  std::vector<Transfer> slots_;
  std::vector<std::size_t> free_;
  int wake_ = -1;
  std::uint64_t wakes_ = 0;
  std::atomic<bool> ending_{false};
  std::thread thread_;
};

}  // namespace

std::unique_ptr<Carrier> uring_carrier(Transfers& transfers, std::int64_t queue_depth) {
  return std::make_unique<UringCarrier>(transfers, queue_depth);
}

}  // namespace unshard::offload
