#include "comm/frame_socket.h"

#include <sys/socket.h>

#include <cerrno>
#include <cstdint>
#include <cstring>

namespace unshard::comm {

namespace {

struct Head {
  std::uint32_t kind = 0, bytes = 0;
};
constexpr std::uint32_t kMostBytes = 256 << 20;

bool is_for_later(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

}  // namespace

void FrameSocket::send(char kind, std::string_view text) {
  const Head head{static_cast<std::uint8_t>(kind), static_cast<std::uint32_t>(text.size())};
  out_.append(reinterpret_cast<const char*>(&head), sizeof(head)).append(text);
  flush();
}

void FrameSocket::flush() {
  while (!out_.empty() && !closed_) {
    const ssize_t sent = ::send(fd_.get(), out_.data(), out_.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && !is_for_later(errno)) closed_ = true;
    if (sent < 0) return;
    out_.erase(0, static_cast<std::size_t>(sent));
  }
}

void FrameSocket::receive() {
  char bytes[16384];
  for (;;) {
    const ssize_t got = ::recv(fd_.get(), bytes, sizeof(bytes), MSG_DONTWAIT);
    if (got > 0) {
      in_.append(bytes, static_cast<std::size_t>(got));
      continue;
    }
    if (got == 0 || !is_for_later(errno)) closed_ = true;
    return;
  }
}

std::optional<Frame> FrameSocket::next() {
  Head head;
  if (in_.size() < sizeof(head)) return {};
  std::memcpy(&head, in_.data(), sizeof(head));
  if (head.bytes > kMostBytes || head.kind > 127) {
    closed_ = true;
    in_.clear();
    return {};
  }
  if (in_.size() < sizeof(head) + head.bytes) return {};
  Frame frame{static_cast<char>(head.kind), in_.substr(sizeof(head), head.bytes)};
  in_.erase(0, sizeof(head) + head.bytes);
  return frame;
}

}  // namespace unshard::comm
