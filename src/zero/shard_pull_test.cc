#include "zero/shard_pull.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <numeric>

#include "unshard/core/error.h"
#include "zero/socket.h"

namespace unshard {
namespace {

/// A pull of two pieces at one end of a connection; the test plays the server at the other.
class ShardPullTest : public testing::Test {
 protected:
  void SetUp() override {
    int pair[2];
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair), 0);
    mine_ = net::Descriptor(pair[0]);
    server_ = net::Descriptor(pair[1]);
  }

  void send(const void* data, std::size_t bytes) {
    ASSERT_EQ(::send(server_.get(), data, bytes, MSG_NOSIGNAL), static_cast<ssize_t>(bytes));
  }
  void send_header(std::uint64_t bytes, bool failed = false) {
    const wire::ReplyHeader header{.bytes = bytes, .failed = failed};
    send(&header, sizeof header);
  }
  /// The pull's own turns, as poll would allow them, until nothing moves.
  static void advance_all(ShardPull& pull) {
    while (!pull.done() && pull.advance() > 0) {
    }
  }

  net::Descriptor mine_, server_;
};

TEST_F(ShardPullTest, IsDoneWithTheLastByteWhateverATurnTakes) {
  std::vector<std::byte> sent(48);
  for (std::size_t i = 0; i < sent.size(); ++i) sent[i] = static_cast<std::byte>(i + 1);
  for (const std::size_t turn : {1, 7, 16, 24, 32, 48, 64}) {  // divides the pieces, doesn't, is larger
    std::vector<std::byte> got(48);
    ShardPull pull(1, mine_.get(), turn);
    pull.want(5, std::span(got).first(32));
    pull.want(6, std::span(got).last(16));
    EXPECT_EQ(pull.payload_bytes(), 48);
    EXPECT_EQ(pull.events(), POLLIN | POLLOUT);
    advance_all(pull);
    EXPECT_EQ(pull.state(), ShardPull::State::header);
    std::vector<char> request(sizeof(wire::RequestHeader) + 2 * sizeof(wire::WantedPiece));
    ASSERT_EQ(::recv(server_.get(), request.data(), request.size(), 0), static_cast<ssize_t>(request.size()));
    send_header(48);
    send(sent.data(), sent.size());
    advance_all(pull);
    EXPECT_TRUE(pull.done()) << "turns of " << turn << " bytes";
    EXPECT_EQ(got, sent);
  }
}

TEST_F(ShardPullTest, AnAnswerMayComeByteByByte) {
  std::vector<std::byte> got(3);
  ShardPull pull(1, mine_.get());
  pull.want(5, got);
  advance_all(pull);
  const wire::ReplyHeader header{.bytes = 3, .failed = 0};
  std::vector<std::byte> answer(sizeof header + 3, std::byte{9});
  std::memcpy(answer.data(), &header, sizeof header);
  for (const auto byte : answer) {
    EXPECT_FALSE(pull.done());
    send(&byte, 1);
    EXPECT_EQ(pull.advance(), 1U);
    EXPECT_EQ(pull.advance(), 0U);
  }
  EXPECT_TRUE(pull.done());
  EXPECT_EQ(got, std::vector<std::byte>(3, std::byte{9}));
}

TEST_F(ShardPullTest, ARefusalCarriesThePeersWordsAlsoWhenThereAreNone) {
  for (const std::string text : {"no such parameter", ""}) {
    std::vector<std::byte> got(3);
    ShardPull pull(4, mine_.get());
    pull.want(5, got);
    advance_all(pull);
    send_header(text.size(), true);
    if (!text.empty()) send(text.data(), text.size());
    try {
      advance_all(pull);
      ADD_FAILURE() << "the refusal was not noticed";
    } catch (const CommError& error) {
      EXPECT_THAT(error.what(), testing::AllOf(testing::HasSubstr("rank 4"), testing::HasSubstr("parameter 5"), testing::HasSubstr(text)));
    }
  }
}

TEST_F(ShardPullTest, AnAnswerOfTheWrongSizeIsAnError) {
  std::vector<std::byte> got(3);
  ShardPull pull(4, mine_.get());
  pull.want(5, got);
  advance_all(pull);
  send_header(4);
  EXPECT_THROW(advance_all(pull), CommError);
}

TEST_F(ShardPullTest, AClosedConnectionNamesTheParameterThatWasRead) {
  std::vector<std::byte> got(6);
  ShardPull pull(4, mine_.get());
  pull.want(5, std::span(got).first(3));
  pull.want(8, std::span(got).last(3));
  advance_all(pull);
  send_header(6);
  send("abcd", 4);
  server_ = net::Descriptor();
  try {
    advance_all(pull);
    ADD_FAILURE() << "the end of the connection was not noticed";
  } catch (const CommError& error) {
    EXPECT_THAT(error.what(), testing::AllOf(testing::HasSubstr("rank 4 is gone"), testing::HasSubstr("parameter 8 (2 of 2")));
  }
}

}  // namespace
}  // namespace unshard
