#pragma once
// How far ranks' clocks are apart, so that their timelines can be put side by side.

#include "unshard/core/timeline.h"

namespace unshard {

class Communicator;

/// This rank's steady clock against rank 0's. Collective. The first rank of each host asks rank 0 for its time over and over; the answer
/// that came back fastest counts, and is wrong by half its round trip at most. A host has one clock: its other ranks take the value over.
/// Where CPU tensors can't travel, the hosts' wall clocks are compared, which is as good as what keeps these together (NTP).
ClockReading read_clock_offset(Communicator& comm);

}  // namespace unshard
