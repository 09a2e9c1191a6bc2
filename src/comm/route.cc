#include "comm/route.h"

#include <algorithm>

namespace unshard::comm {

namespace {

int host_of(const HostMap& map, int rank) { return map.host[static_cast<std::size_t>(rank)]; }
int local_of(const HostMap& map, int rank) { return map.local[static_cast<std::size_t>(rank)]; }

Route sorted(Route route) {
  const auto before = [](const Route::Leg& a, const Route::Leg& b) { return a.peer != b.peer ? a.peer < b.peer : a.piece < b.piece; };
  std::sort(route.sends.begin(), route.sends.end(), before);
  std::sort(route.receives.begin(), route.receives.end(), before);
  return route;
}

}  // namespace

int handler(const HostMap& map, int host, int index) {
  const auto& ranks = map.ranks[static_cast<std::size_t>(host)];
  return ranks[static_cast<std::size_t>(index) % ranks.size()];
}

Route gather_route(const HostMap& map, int rank) {
  Route route;
  for (int host = 0; host < map.hosts(); ++host)
    if (host != host_of(map, rank)) route.sends.push_back({handler(map, host, local_of(map, rank)), rank});
  for (int source = 0; source < map.world_size(); ++source)
    if (host_of(map, source) != host_of(map, rank) && handler(map, host_of(map, rank), local_of(map, source)) == rank)
      route.receives.push_back({source, source});
  return sorted(std::move(route));
}

// The way back of a gather.
Route scatter_route(const HostMap& map, int rank) {
  Route route = gather_route(map, rank);
  std::swap(route.sends, route.receives);
  return route;
}

int spread_pieces(const HostMap& map) {
  int most = 0;
  for (int host = 0; host < map.hosts(); ++host) most = std::max(most, map.size(host));
  return most;
}

Route spread_route(const HostMap& map, int rank) {
  Route route;
  for (int piece = 0; piece < spread_pieces(map); ++piece) {
    if (handler(map, host_of(map, rank), piece) != rank) continue;
    for (int host = 0; host < map.hosts(); ++host)
      if (host != host_of(map, rank)) route.sends.push_back({handler(map, host, piece), piece});
  }
  route = sorted(std::move(route));
  route.receives = route.sends;
  return route;
}

Route broadcast_route(const HostMap& map, int rank, int root) {
  Route route = spread_route(map, rank);
  if (host_of(map, rank) == host_of(map, root)) {
    route.receives.clear();
    return route;
  }
  route.sends.clear();
  std::erase_if(route.receives, [&](const Route::Leg& leg) { return host_of(map, leg.peer) != host_of(map, root); });
  return route;
}

Route all_to_all_route(const HostMap& map, int rank) {
  Route route;
  for (int peer = 0; peer < map.world_size(); ++peer) {
    if (host_of(map, peer) == host_of(map, rank)) continue;
    route.sends.push_back({peer, peer});
    route.receives.push_back({peer, rank});
  }
  return route;
}

Route leaders_route(const HostMap& map, int rank) {
  Route route;
  if (local_of(map, rank) != 0) return route;
  for (int host = 0; host < map.hosts(); ++host)
    if (host != host_of(map, rank)) route.sends.push_back({handler(map, host, 0), 0});
  route.receives = route.sends;
  return route;
}

}  // namespace unshard::comm
