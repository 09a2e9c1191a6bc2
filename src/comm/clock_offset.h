#pragma once
// How far ranks' clocks are apart, so that their timelines can be put side by side.

#include "unshard/core/timeline.h"

namespace unshard {

class Communicator;

inline constexpr int kFirstClockRounds = 12, kLaterClockRounds = 3;

/// This rank's steady clock against rank 0's. Collective; `rounds` alike on all ranks. The first rank of each host asks rank 0 for its time
/// over and over; the answer that came back fastest counts, and is wrong by half its round trip at most. A host has one clock: its other
/// ranks take the value over. Where CPU tensors can't travel, the hosts' wall clocks are compared, which is as good as what keeps these
/// together (NTP).
ClockReading read_clock_offset(Communicator& comm, int rounds = kFirstClockRounds);

}  // namespace unshard
