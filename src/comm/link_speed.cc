#include "comm/link_speed.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <chrono>
#include <sstream>

#include "unshard/comm/communicator.h"
#include "unshard/core/error.h"

namespace unshard {
namespace {

constexpr int kTag = 0x71AF, kPings = 6, kStreams = 3;
constexpr std::int64_t kLong = 1 << 20;  // bytes

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

/// The shortest of some times from sending `message` to having an answer of 8 bytes.
double fastest_answer(Communicator& comm, int rank, const at::Tensor& message, int rounds) {
  auto answer = at::empty({1}, at::kLong);
  double best = 1e30;
  for (int round = 0; round < rounds; ++round) {
    const double start = seconds();
    comm.send(message, rank, kTag);
    comm.recv(answer, rank, kTag);
    best = std::min(best, seconds() - start);
  }
  return best;
}

LinkSpeed ask(Communicator& comm, int rank) {
  try {
    LinkSpeed speed;
    speed.round_trip_s = fastest_answer(comm, rank, at::zeros({1}, at::kLong), kPings);
    const double together = fastest_answer(comm, rank, at::zeros({kLong}, at::kByte), kStreams);
    speed.bytes_per_s = static_cast<double>(kLong) / std::max(together - speed.round_trip_s, 1e-6);
    return speed;
  } catch (const std::invalid_argument&) {  // CPU tensors don't travel: found on both sides before anything is sent
    return {};
  }
}

void answer(Communicator& comm, int rank) {
  auto small = at::zeros({1}, at::kLong), large = at::empty({kLong}, at::kByte);
  try {
    for (int round = 0; round < kPings + kStreams; ++round) {
      comm.recv(round < kPings ? small : large, rank, kTag);
      comm.send(small, rank, kTag);
    }
  } catch (const std::invalid_argument&) {  // as at the other side
  }
}

}  // namespace

LinkSpeed measure_links(Communicator& comm) {
  const auto hosts = comm.hosts();
  const int count = 1 + *std::max_element(hosts.begin(), hosts.end());
  if (count == 1) return {};
  LinkSpeed largest;
  for (int host = 1; host < count; ++host) {
    const int other = static_cast<int>(std::find(hosts.begin(), hosts.end(), host) - hosts.begin());
    if (comm.rank() == other) answer(comm, 0);
    if (comm.rank() != 0) continue;
    const auto speed = ask(comm, other);
    if (speed.bytes_in_flight() > largest.bytes_in_flight()) largest = speed;
  }
  std::istringstream said(comm.all_gather_strings(cat(largest.round_trip_s, ' ', largest.bytes_per_s)).front());
  said >> largest.round_trip_s >> largest.bytes_per_s;
  return largest;
}

}  // namespace unshard
