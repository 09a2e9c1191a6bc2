#pragma once
// Who sends what to whom between hosts. Pure arithmetic, worked out alike by all ranks.
#include <vector>

#include "comm/host_map.h"

namespace unshard::comm {

/// The pieces that one rank sends to and receives from ranks of other hosts in one exchange, in the order in which they lie in its buffers:
/// by peer, then by piece.
struct Route {
  struct Leg {
    int peer, piece;
    bool operator==(const Leg&) const = default;
  };
  std::vector<Leg> sends, receives;
};

/// The rank of host `host` that handles piece number `index` there: the pieces go round its ranks.
int handler(const HostMap& map, int host, int index);

/// Piece s is what rank s brings: it goes to one rank of every other host.
Route gather_route(const HostMap& map, int rank);
/// Piece d is for rank d: one rank of every other host sends it.
Route scatter_route(const HostMap& map, int rank);
/// Pieces 0 .. spread_pieces() - 1: every host's handler of a piece sends to and receives from every other host's.
Route spread_route(const HostMap& map, int rank);
int spread_pieces(const HostMap& map);
/// The same pieces, from the root's host to all others.
Route broadcast_route(const HostMap& map, int rank, int root);
/// Piece d is for rank d, from everyone.
Route all_to_all_route(const HostMap& map, int rank);
/// One piece (0) from the first rank of each host to that of every other.
Route leaders_route(const HostMap& map, int rank);

}  // namespace unshard::comm
