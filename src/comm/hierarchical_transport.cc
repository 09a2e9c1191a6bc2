#include "comm/hierarchical_transport.h"

#include <ATen/ops/empty.h>

#include "comm/hierarchical_flight.h"
#include "comm/hierarchical_pieces.h"
#include "unshard/core/error.h"

namespace unshard::comm {

namespace {

/// Own ranks' pieces first, then what each rank of the host receives, together: it comes in one message.
std::vector<int> places_of_gather(const HostMap& map, int rank) {
  const auto& here = map.neighbours(rank);
  std::vector<int> places(static_cast<std::size_t>(map.world_size()));
  int next = 0;
  for (int neighbour : here) places[static_cast<std::size_t>(neighbour)] = next++;
  for (int neighbour : here)
    for (const auto& leg : gather_route(map, neighbour).receives) places[static_cast<std::size_t>(leg.piece)] = next++;
  return places;
}

std::vector<int> spread_pieces_of(const HostMap& map, int rank) {
  std::vector<int> mine;
  for (int piece = 0; piece < spread_pieces(map); ++piece)
    if (handler(map, map.host[static_cast<std::size_t>(rank)], piece) == rank) mine.push_back(piece);
  return mine;
}

Signature signature_of(const Call& call, const at::Tensor& tensor, ReduceOp op = {}, int root = 0) {
  return make_signature(call, tensor.nbytes(), static_cast<int>(tensor.scalar_type()), op, root);
}

}  // namespace

HierarchicalTransport::HierarchicalTransport(std::shared_ptr<HostGroupImpl> local, C10dTransport& link, HostMap map, int rank)
    : local_(std::move(local)),
      link_(link),
      map_(std::move(map)),
      rank_(rank),
      world_(map_.world_size()),
      host_(map_.host[static_cast<std::size_t>(rank)]),
      slots_(local_),
      mailbox_(local_),
      gather_(gather_route(map_, rank)),
      scatter_(scatter_route(map_, rank)),
      spread_(spread_route(map_, rank)),
      all_to_all_(all_to_all_route(map_, rank)),
      leaders_(leaders_route(map_, rank)),
      gather_places_(places_of_gather(map_, rank)),
      spread_mine_(spread_pieces_of(map_, rank)) {}

HierarchicalTransport::Flight HierarchicalTransport::take_slot(std::size_t own_bytes) {
  Flight flight;
  flight.slot = slots_.take();
  if (own_bytes > 0) flight.own = at::empty({static_cast<std::int64_t>(own_bytes)}, at::kByte);
  return flight;
}

void HierarchicalTransport::start_exchange(const Call& call, Flight& flight, const Route& route, const Length& length) {
  std::vector<std::int64_t> send(static_cast<std::size_t>(world_)), receive(send.size());
  for (const auto& leg : route.sends) send[static_cast<std::size_t>(leg.peer)] += static_cast<std::int64_t>(length(leg.piece));
  for (const auto& leg : route.receives) receive[static_cast<std::size_t>(leg.peer)] += static_cast<std::int64_t>(length(leg.piece));
  if (!flight.received.defined()) {
    std::int64_t total = 0;
    for (const auto bytes : receive) total += bytes;
    flight.received = at::empty({total}, at::kByte);
  }
  flight.work = link_.start_exchange(call, flight.received, flight.sent, receive, send);
}

// A rank's own piece goes into shared memory, and the pieces of other hosts' ranks are received there.
void HierarchicalTransport::all_gather(const Call& call, at::Tensor& output, const at::Tensor& input) {
  const Chunks chunks(input.nbytes(), 2 * HostSlots::kLaneBytes / static_cast<std::size_t>(world_));
  const auto signature = signature_of(call, input);
  const auto place = [&](int rank) { return static_cast<std::size_t>(gather_places_[static_cast<std::size_t>(rank)]); };
  std::array<Flight, 2> flights;
  pipelined(
      chunks.count,
      [&](std::uint64_t k) {
        const std::size_t bytes = chunks.length(k);
        Flight& flight = flights[k % 2] = take_slot();
        const std::byte* mine = bytes_of(input) + chunks.offset(k);
        copy_bytes(flight.slot + place(rank_) * bytes, mine, bytes);
        const Length length = [bytes](int) { return bytes; };
        if (!gather_.receives.empty())
          flight.received = slots_.over(flight.slot + place(gather_.receives.front().piece) * bytes, gather_.receives.size() * bytes);
        launch(call, flight, gather_, length, [&](const Route::Leg&, std::byte* to) { copy_bytes(to, mine, bytes); });
      },
      [&](std::uint64_t k) {
        const std::size_t bytes = chunks.length(k);
        Flight& flight = flights[k % 2];
        link_.finish(call, flight.work);
        slots_.meet(call, signature);
        for (int rank = 0; rank < world_; ++rank)
          copy_bytes(bytes_of(output) + static_cast<std::size_t>(rank) * chunks.bytes + chunks.offset(k), flight.slot + place(rank) * bytes,
                     bytes);
      });
}

// The root's host cuts a piece into parts, which its ranks send and those of other hosts receive and put together.
void HierarchicalTransport::broadcast(const Call& call, at::Tensor& tensor, int root) {
  const Chunks chunks(tensor.nbytes(), HostSlots::kLaneBytes);
  const auto signature = signature_of(call, tensor, {}, root);
  const Route route = broadcast_route(map_, rank_, root);
  std::array<Flight, 2> flights;
  const auto parts_of = [&](std::uint64_t k) { return Parts(chunks.length(k), 1, spread_pieces(map_)); };
  pipelined(
      chunks.count,
      [&](std::uint64_t k) {
        const Parts parts = parts_of(k);
        Flight& flight = flights[k % 2] = take_slot();
        const std::byte* whole = slots_.result(flight.slot);
        if (rank_ == root) copy_bytes(slots_.result(flight.slot), bytes_of(tensor) + chunks.offset(k), parts.bytes);
        if (is_here(root)) slots_.meet(call, signature);
        const Length length = [parts](int piece) { return parts.length(piece); };
        launch(call, flight, route, length,
               [&](const Route::Leg& leg, std::byte* to) { copy_bytes(to, whole + parts.begin(leg.piece), parts.length(leg.piece)); });
      },
      [&](std::uint64_t k) {
        const Parts parts = parts_of(k);
        Flight& flight = flights[k % 2];
        std::byte* whole = slots_.result(flight.slot);
        land(
            call, flight, route, [parts](int piece) { return parts.length(piece); },
            [&](const Route::Leg& leg, const std::byte* from) {
              copy_bytes(whole + parts.begin(leg.piece), from, parts.length(leg.piece));
            });
        slots_.meet(call, signature);
        if (rank_ != root) copy_bytes(bytes_of(tensor) + chunks.offset(k), whole, parts.bytes);
      });
}

void HierarchicalTransport::all_to_all(const Call& call, at::Tensor& output, const at::Tensor& input) {
  const Chunks chunks(input.nbytes() / static_cast<std::size_t>(world_), HostSlots::kLaneBytes / static_cast<std::size_t>(world_));
  const auto signature = signature_of(call, input);
  const auto at = [&](const at::Tensor& tensor, int rank, std::uint64_t k) {
    return bytes_of(tensor) + static_cast<std::size_t>(rank) * chunks.bytes + chunks.offset(k);
  };
  const auto& here = map_.neighbours(rank_);
  std::array<Flight, 2> flights;
  pipelined(
      chunks.count,
      [&](std::uint64_t k) {
        const std::size_t bytes = chunks.length(k);
        Flight& flight = flights[k % 2] = take_slot();
        std::byte* lane = slots_.lane(flight.slot, slots_.rank());
        for (std::size_t i = 0; i < here.size(); ++i) copy_bytes(lane + i * bytes, at(input, here[i], k), bytes);
        const Length length = [bytes](int) { return bytes; };
        launch(call, flight, all_to_all_, length,
               [&](const Route::Leg& leg, std::byte* to) { copy_bytes(to, at(input, leg.piece, k), bytes); });
      },
      [&](std::uint64_t k) {
        const std::size_t bytes = chunks.length(k);
        Flight& flight = flights[k % 2];
        land(
            call, flight, all_to_all_, [bytes](int) { return bytes; },
            [&](const Route::Leg& leg, const std::byte* from) { copy_bytes(at(output, leg.peer, k), from, bytes); });
        slots_.meet(call, signature);
        const std::size_t mine = static_cast<std::size_t>(slots_.rank()) * bytes;
        for (std::size_t i = 0; i < here.size(); ++i)
          copy_bytes(at(output, here[i], k), slots_.lane(flight.slot, static_cast<int>(i)) + mine, bytes);
      });
}

void HierarchicalTransport::send(const Call& call, const at::Tensor& tensor, int destination, int tag) {
  if (!is_here(destination)) return link_.send(call, tensor, destination, tag);
  mailbox_.send(call, bytes_of(tensor), tensor.nbytes(), map_.local[static_cast<std::size_t>(destination)], tag);
}

void HierarchicalTransport::recv(const Call& call, at::Tensor& tensor, int source, int tag) {
  if (!is_here(source)) return link_.recv(call, tensor, source, tag);
  mailbox_.recv(call, bytes_of(tensor), tensor.nbytes(), map_.local[static_cast<std::size_t>(source)], tag);
}

std::vector<std::string> HierarchicalTransport::exchange_leaders(const Call& call, const std::string& mine) {
  std::vector<std::string> all(static_cast<std::size_t>(map_.hosts()));
  if (!leaders_.sends.empty()) all[static_cast<std::size_t>(host_)] = mine;
  std::vector<std::uint64_t> lengths(static_cast<std::size_t>(world_));
  const std::uint64_t length = mine.size();
  Flight flight;
  const Length word = [](int) { return sizeof(std::uint64_t); };
  launch(call, flight, leaders_, word, [&](const Route::Leg&, std::byte* to) { std::memcpy(to, &length, sizeof(length)); });
  land(call, flight, leaders_, word, [&](const Route::Leg& leg, const std::byte* from) {
    std::memcpy(&lengths[static_cast<std::size_t>(leg.peer)], from, sizeof(length));
  });

  std::vector<std::int64_t> send(lengths.size()), receive(lengths.begin(), lengths.end());
  std::int64_t out = 0, in = 0;
  for (const auto& leg : leaders_.sends) out += send[static_cast<std::size_t>(leg.peer)] = static_cast<std::int64_t>(length);
  for (const auto bytes : receive) in += bytes;
  at::Tensor sent = at::empty({out}, at::kByte), received = at::empty({in}, at::kByte);
  std::byte* to = bytes_of(sent);
  for (std::size_t i = 0; i < leaders_.sends.size(); ++i, to += length)
    copy_bytes(to, reinterpret_cast<const std::byte*>(mine.data()), mine.size());
  link_.finish(call, link_.start_exchange(call, received, sent, receive, send));
  const char* from = reinterpret_cast<const char*>(bytes_of(received));
  for (const auto& leg : leaders_.receives) {
    const auto bytes = lengths[static_cast<std::size_t>(leg.peer)];
    all[static_cast<std::size_t>(map_.host[static_cast<std::size_t>(leg.peer)])].assign(from, bytes);
    from += bytes;
  }
  return all;
}

void HierarchicalTransport::barrier(const Call& call) {
  const Signature signature = make_signature(call, 0, 0, {}, 0);
  slots_.meet(call, signature);
  Flight flight;
  const Length token = [](int) { return std::size_t{1}; };
  launch(call, flight, leaders_, token, [](const Route::Leg&, std::byte* to) { *to = std::byte{0}; });
  link_.finish(call, flight.work);
  slots_.meet(call, signature);
}

std::vector<std::string> HierarchicalTransport::all_gather_strings(const Call& call, const std::string& mine) {
  const std::string place(call.op);
  std::string ours;
  for (const auto& text : local_->all_gather_strings(mine, place)) {
    const std::uint64_t length = text.size();
    ours.append(reinterpret_cast<const char*>(&length), sizeof(length)).append(text);
  }
  std::string everything;
  for (const auto& host : exchange_leaders(call, ours)) everything += host;
  everything = local_->all_gather_strings(everything, place).front();
  std::vector<std::string> all(static_cast<std::size_t>(world_));
  const char* from = everything.data();
  for (const auto& ranks : map_.ranks)
    for (int rank : ranks) {
      std::uint64_t length = 0;
      std::memcpy(&length, from, sizeof(length));
      all[static_cast<std::size_t>(rank)].assign(from + sizeof(length), length);
      from += sizeof(length) + length;
    }
  return all;
}

}  // namespace unshard::comm
