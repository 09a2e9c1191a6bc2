#include "zero/shard_pull.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "unshard/core/error.h"
#include "zero/socket.h"

namespace unshard {
namespace {
constexpr std::size_t kMaxRefusal = 1 << 16;
}  // namespace

short ShardPull::events() const { return state_ == State::sending ? POLLIN | POLLOUT : POLLIN; }

std::string ShardPull::position() const {
  if (parts_.empty()) return "no parameter";
  const std::size_t at = std::min(part_, ids_.size() - 1);
  return ids_.size() == 1 ? cat("parameter ", ids_[0]) : cat("parameter ", ids_[at], " (", at + 1, " of ", ids_.size(), " asked for)");
}

std::int64_t ShardPull::payload_bytes() const {
  std::size_t bytes = 0;
  for (const auto& part : parts_) bytes += part.size();
  return static_cast<std::int64_t>(bytes);
}

void ShardPull::broken(int error_number) const {
  throw CommError(cat("rank ", rank_, " is gone: its connection ",
                      error_number == 0 ? "was closed" : "failed (" + net::error_text(error_number) + ")", " while ", position(),
                      " was read from it"));
}

std::size_t ShardPull::advance() {
  switch (state_) {
    case State::sending:
      return send_request();
    case State::header:
      return receive_header();
    case State::pieces:
      return receive_pieces();
    case State::refusal:
      return receive_refusal();
    case State::done:
      break;
  }
  return 0;
}

std::size_t ShardPull::send_request() {
  if (request_.empty()) {
    const wire::RequestHeader header{.count = static_cast<std::uint32_t>(parts_.size())};
    request_.resize(sizeof header + parts_.size() * sizeof(wire::WantedPiece));
    std::memcpy(request_.data(), &header, sizeof header);
    for (std::size_t i = 0; i < parts_.size(); ++i) {
      const wire::WantedPiece want{.id = ids_[i], .bytes = parts_[i].size()};
      std::memcpy(request_.data() + sizeof header + i * sizeof want, &want, sizeof want);
    }
  }
  const ssize_t sent = ::send(socket_, request_.data() + offset_, request_.size() - offset_, MSG_NOSIGNAL);
  if (sent < 0) {
    if (errno != EAGAIN && errno != EINTR) broken(errno);
    return 0;
  }
  offset_ += static_cast<std::size_t>(sent);
  if (offset_ == request_.size()) offset_ = 0, state_ = State::header;
  return static_cast<std::size_t>(sent);
}

std::size_t ShardPull::receive(std::byte* data, std::size_t bytes) {
  const ssize_t got = ::recv(socket_, data, bytes, 0);
  if (got > 0) return static_cast<std::size_t>(got);
  if (got == 0) broken(0);
  if (errno != EAGAIN && errno != EINTR) broken(errno);
  return 0;
}

std::size_t ShardPull::receive_header() {
  const std::size_t got = receive(reinterpret_cast<std::byte*>(&header_) + offset_, sizeof header_ - offset_);
  offset_ += got;
  if (offset_ < sizeof header_) return got;
  offset_ = 0;
  const auto expected = static_cast<std::uint64_t>(payload_bytes());
  if (header_.failed) {
    refusal_.resize(std::min<std::size_t>(header_.bytes, kMaxRefusal));
    state_ = State::refusal;
  } else if (header_.bytes != expected) {
    throw CommError(cat("rank ", rank_, " announced ", header_.bytes, " bytes for ", position(), ", expected ", expected));
  } else {
    state_ = State::pieces;
  }
  return got + (state_ == State::refusal ? receive_refusal() : receive_pieces());
}

std::size_t ShardPull::receive_pieces() {
  std::size_t total = 0;
  while (part_ < parts_.size() && total < turn_bytes_) {
    const auto& part = parts_[part_];
    const std::size_t got = offset_ == part.size() ? 0 : receive(part.data() + offset_, std::min(part.size() - offset_, turn_bytes_));
    total += got;
    offset_ += got;
    if (offset_ == part.size()) {
      offset_ = 0;
      ++part_;
    } else if (got == 0) {
      break;  // the socket is empty for now
    }
  }
  if (part_ == parts_.size()) state_ = State::done;
  return total;
}

std::size_t ShardPull::receive_refusal() {
  const std::size_t got =
      offset_ == refusal_.size() ? 0 : receive(reinterpret_cast<std::byte*>(refusal_.data()) + offset_, refusal_.size() - offset_);
  offset_ += got;
  if (offset_ == refusal_.size()) throw CommError(cat("rank ", rank_, " refused ", position(), ": ", refusal_));
  return got;
}

}  // namespace unshard
