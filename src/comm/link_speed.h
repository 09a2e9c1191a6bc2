#pragma once
// How fast the links between hosts are, measured between the ranks themselves.

namespace unshard {

class Communicator;

struct LinkSpeed {
  double round_trip_s = 0;  ///< of a message of 8 bytes there and back
  double bytes_per_s = 0;   ///< of one long message
  /// What the link carries in a round trip: sending less at a time leaves it idle.
  double bytes_in_flight() const { return round_trip_s * bytes_per_s; }
};

/// The link with most bytes in flight of those between rank 0's host and the others; zeros with one host, or where CPU tensors don't
/// travel. Collective; the same on all ranks. Cost: some round trips and 3 MiB to each other host, once.
LinkSpeed measure_links(Communicator& comm);

}  // namespace unshard
