#pragma once
// The templates of HierarchicalTransport that both of its source files use.
#include <ATen/ops/empty.h>

#include "comm/hierarchical_pieces.h"
#include "comm/hierarchical_transport.h"

namespace unshard::comm {

template <class Fill>
void HierarchicalTransport::launch(const Call& call, Flight& flight, const Route& route, const Length& length, Fill&& fill) {
  std::size_t total = 0;
  for (const auto& leg : route.sends) total += length(leg.piece);
  flight.sent = at::empty({static_cast<std::int64_t>(total)}, at::kByte);
  std::byte* to = bytes_of(flight.sent);
  for (const auto& leg : route.sends) {
    fill(leg, to);
    to += length(leg.piece);
  }
  start_exchange(call, flight, route, length);
}

template <class Visit>
void HierarchicalTransport::land(const Call& call, Flight& flight, const Route& route, const Length& length, Visit&& visit) {
  link_.finish(call, flight.work);
  const std::byte* from = bytes_of(flight.received);
  for (const auto& leg : route.receives) {
    visit(leg, from);
    from += length(leg.piece);
  }
}

}  // namespace unshard::comm
