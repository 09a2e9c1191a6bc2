#pragma once
// One request to one peer and its answer, moved along whenever the socket allows. Bytes go straight to where they belong.
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "zero/shard_wire.h"

namespace unshard {

class ShardPull {
 public:
  /// States: sending the request -> header of the reply -> pieces (or the text of the peer's refusal) -> done.
  enum class State { sending, header, pieces, refusal, done };

  /// \param turn_bytes  what one advance() takes at most, about, so that all peers of a fetch advance.
  ShardPull(int rank, int socket, std::size_t turn_bytes = 8 << 20) : rank_(rank), socket_(socket), turn_bytes_(turn_bytes) {}
  /// Before the first advance(): `piece` of parameter `id` is to arrive at `destination`.
  void want(int id, std::span<std::byte> destination) { ids_.push_back(id), parts_.push_back(destination); }
  /// Of all pieces together.
  std::int64_t payload_bytes() const;

  int rank() const { return rank_; }
  int socket() const { return socket_; }
  State state() const { return state_; }
  bool done() const { return state_ == State::done; }
  /// poll's events this pull waits for.
  short events() const;
  /// Do what is possible without waiting. \return bytes moved (0: nothing was possible).
  /// \throws CommError the connection broke, or the peer refused; names rank and parameter.
  std::size_t advance();
  /// "parameter 3 (2 of 5 asked for)": what a message should name.
  std::string position() const;

 private:
  std::size_t send_request();
  std::size_t receive(std::byte* data, std::size_t bytes);
  std::size_t receive_header();
  std::size_t receive_pieces();
  std::size_t receive_refusal();
  [[noreturn]] void broken(int error_number) const;

  const int rank_, socket_;
  const std::size_t turn_bytes_;
  State state_ = State::sending;
  std::vector<int> ids_;
  std::vector<std::span<std::byte>> parts_;
  std::vector<std::byte> request_;
  wire::ReplyHeader header_{};
  std::string refusal_;
  std::size_t part_ = 0, offset_ = 0;  // offset into the request, the header, the piece or the refusal
};

}  // namespace unshard
