#pragma once
// Short messages over a non-blocking socket: what can't be sent at once waits here, what comes in parts is put together.
#include <optional>
#include <string>
#include <string_view>

#include "comm/unique_fd.h"

namespace unshard::comm {

struct Frame {
  char kind = 0;
  std::string text;
};

class FrameSocket {
 public:
  FrameSocket() = default;
  explicit FrameSocket(UniqueFd fd) : fd_(std::move(fd)) {}

  int fd() const { return fd_.get(); }
  void send(char kind, std::string_view text);
  /// Send what waits, as far as it goes.
  void flush();
  bool has_unsent() const { return !out_.empty() && !closed_; }
  /// Read what there is.
  void receive();
  std::optional<Frame> next();
  /// The other end has closed it, or sent what isn't a frame; what came before is still there for next().
  bool closed() const { return closed_; }

 private:
  UniqueFd fd_;
  std::string in_, out_;
  bool closed_ = false;
};

}  // namespace unshard::comm
