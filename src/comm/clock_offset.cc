#include "comm/clock_offset.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <sstream>
#include <tuple>

#include "unshard/comm/communicator.h"
#include "unshard/core/error.h"

namespace unshard {
namespace {

constexpr int kTag = 0x71AE;
constexpr std::int64_t kNtpNs = 10'000'000;  // what wall clocks of a cluster are apart at most, as a rule

/// Asks rank 0 for its time. \return nothing where CPU tensors don't travel (found before anything is sent, on both sides).
std::optional<ClockReading> ask(Communicator& comm, int rounds) {
  auto time = at::empty({1}, at::kLong);
  ClockReading best;
  try {
    for (int round = 0; round < rounds; ++round) {
      const auto sent = Timeline::now_ns();
      comm.send(time, 0, kTag);
      comm.recv(time, 0, kTag);
      const auto received = Timeline::now_ns(), trip = received - sent;
      if (round > 0 && trip / 2 >= best.uncertainty_ns) continue;
      best = {received, *time.const_data_ptr<std::int64_t>() - (sent + trip / 2), trip / 2};
    }
  } catch (const std::invalid_argument&) {
    return std::nullopt;
  }
  return best;
}

void answer(Communicator& comm, int rank, int rounds) {
  auto time = at::empty({1}, at::kLong);
  try {
    for (int round = 0; round < rounds; ++round) {
      comm.recv(time, rank, kTag);
      *time.mutable_data_ptr<std::int64_t>() = Timeline::now_ns();
      comm.send(time, rank, kTag);
    }
  } catch (const std::invalid_argument&) {  // as at the other side
  }
}

std::int64_t wall_minus_steady_ns() {
  const auto wall = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(wall).count() - Timeline::now_ns();
}

}  // namespace

ClockReading read_clock_offset(Communicator& comm, int rounds) {
  const auto hosts = comm.hosts();
  const auto first_of = [&](int host) { return static_cast<int>(std::find(hosts.begin(), hosts.end(), host) - hosts.begin()); };
  const int rank = comm.rank(), count = 1 + *std::max_element(hosts.begin(), hosts.end());
  if (count == 1) return {Timeline::now_ns(), 0, 0};
  std::optional<ClockReading> mine = ClockReading{};
  for (int host = 1; host < count; ++host) {
    if (rank == 0) answer(comm, first_of(host), rounds);
    if (rank == first_of(host)) mine = ask(comm, rounds);
  }
  const auto said = comm.all_gather_strings(
      cat(mine.has_value(), ' ', mine ? mine->offset_ns : 0, ' ', mine ? mine->uncertainty_ns : 0, ' ', wall_minus_steady_ns()));
  const auto read = [&said](int from) {
    std::istringstream text(said[static_cast<std::size_t>(from)]);
    bool asked = false;
    ClockReading reading;
    std::int64_t wall = 0;
    text >> asked >> reading.offset_ns >> reading.uncertainty_ns >> wall;
    return std::tuple(asked, reading, wall);
  };
  const auto [zero_asked, zero, zero_wall] = read(0);
  auto [asked, reading, wall] = read(first_of(hosts[static_cast<std::size_t>(rank)]));
  if (!asked) reading = {0, wall - zero_wall, kNtpNs};
  reading.at_ns = Timeline::now_ns();
  return reading;
}

}  // namespace unshard
