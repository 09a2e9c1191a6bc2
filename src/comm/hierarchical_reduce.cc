// Reductions of the hierarchical transport: inside the host first, in rank order, then one part a host, in the order of the hosts.
#include <ATen/ops/empty.h>

#include "comm/hierarchical_flight.h"
#include "comm/hierarchical_pieces.h"
#include "comm/hierarchical_transport.h"
#include "comm/reduce_kernels.h"

namespace unshard::comm {

namespace {
/// Up to here a whole tensor's sum travels to each host at once: one exchange instead of two. With two hosts it is as few bytes at any
/// size.
constexpr std::size_t kWholeBytes = 64 << 10;
}  // namespace

template <class Take>
void HierarchicalTransport::scatter(const Call& call, const at::Tensor& input, ReduceOp op, Take&& take) {
  const auto world = static_cast<std::size_t>(world_), ranks = static_cast<std::size_t>(slots_.size());
  const Chunks chunks(input.nbytes() / world, HostSlots::kLaneBytes / world);
  const auto signature = make_signature(call, input.nbytes(), static_cast<int>(input.scalar_type()), op, 0);
  const std::size_t element = input.element_size();
  std::vector<const void*> inputs(ranks), partials(static_cast<std::size_t>(map_.hosts()));
  std::array<Flight, 2> flights;
  pipelined(
      chunks.count,
      [&](std::uint64_t k) {
        const std::size_t bytes = chunks.length(k);
        Flight& flight = flights[k % 2] = take_slot(bytes);
        const auto slice = [&](std::size_t rank) { return bytes_of(input) + rank * chunks.bytes + chunks.offset(k); };
        if (ranks > 1) {
          std::byte* lane = slots_.lane(flight.slot, slots_.rank());
          for (std::size_t rank = 0; rank < world; ++rank) copy_bytes(lane + rank * bytes, slice(rank), bytes);
        }
        slots_.meet(call, signature);
        const auto reduce_here = [&](int destination, std::byte* to) {
          const auto index = static_cast<std::size_t>(destination);
          for (std::size_t r = 0; r < ranks; ++r)
            inputs[r] = ranks > 1 ? slots_.lane(flight.slot, static_cast<int>(r)) + index * bytes : slice(index);
          reduce_arrays(static_cast<std::int64_t>(bytes / element), input.scalar_type(), op, to, inputs.data(), slots_.size());
        };
        const Length length = [bytes](int) { return bytes; };
        launch(call, flight, scatter_, length, [&](const Route::Leg& leg, std::byte* to) { reduce_here(leg.piece, to); });
        reduce_here(rank_, bytes_of(flight.own));
      },
      [&](std::uint64_t k) {
        const std::size_t bytes = chunks.length(k);
        Flight& flight = flights[k % 2];
        partials[static_cast<std::size_t>(host_)] = bytes_of(flight.own);
        land(
            call, flight, scatter_, [bytes](int) { return bytes; },
            [&](const Route::Leg& leg, const std::byte* from) {
              partials[static_cast<std::size_t>(map_.host[static_cast<std::size_t>(leg.peer)])] = from;
            });
        take(chunks.offset(k), bytes, partials);
      });
}

void HierarchicalTransport::reduce_scatter(const Call& call, at::Tensor& output, const at::Tensor& input, ReduceOp op) {
  scatter(call, input, op, [&](std::size_t offset, std::size_t bytes, const std::vector<const void*>& partials) {
    reduce_arrays(static_cast<std::int64_t>(bytes / input.element_size()), input.scalar_type(), op, bytes_of(output) + offset,
                  partials.data(), map_.hosts());
  });
}

void HierarchicalTransport::reduce_scatter_by_host(const Call& call, at::Tensor& output, const at::Tensor& input) {
  const std::size_t slice = input.nbytes() / static_cast<std::size_t>(world_);
  scatter(call, input, ReduceOp::sum, [&](std::size_t offset, std::size_t bytes, const std::vector<const void*>& partials) {
    for (std::size_t host = 0; host < partials.size(); ++host)
      copy_bytes(bytes_of(output) + host * slice + offset, static_cast<const std::byte*>(partials[host]), bytes);
  });
}

void HierarchicalTransport::all_reduce(const Call& call, at::Tensor& tensor, ReduceOp op) {
  if (map_.hosts() > 2 && tensor.nbytes() > kWholeBytes)
    all_reduce_sliced(call, tensor, op);
  else
    all_reduce_spread(call, tensor, op);
}

// Each rank adds up and sends its parts of every piece, gets the same parts of the other hosts, and shares the sum.
void HierarchicalTransport::all_reduce_spread(const Call& call, at::Tensor& tensor, ReduceOp op) {
  const auto dtype = tensor.scalar_type();
  const std::size_t element = tensor.element_size(), ranks = static_cast<std::size_t>(slots_.size());
  const Chunks chunks(tensor.nbytes(), HostSlots::kLaneBytes);
  const auto signature = make_signature(call, tensor.nbytes(), static_cast<int>(dtype), op, 0);
  const auto parts_of = [&](std::uint64_t k) { return Parts(chunks.length(k), element, spread_pieces(map_)); };
  const auto hosts = static_cast<std::size_t>(map_.hosts());
  std::vector<const void*> inputs(ranks), partials(hosts * static_cast<std::size_t>(spread_pieces(map_)));
  const auto partial = [&](int host, int piece) -> const void*& {
    return partials[static_cast<std::size_t>(piece) * hosts + static_cast<std::size_t>(host)];
  };
  std::array<Flight, 2> flights;
  pipelined(
      chunks.count,
      [&](std::uint64_t k) {
        const Parts parts = parts_of(k);
        const std::byte* mine = bytes_of(tensor) + chunks.offset(k);
        Flight& flight = flights[k % 2] = take_slot(parts.bytes);
        copy_bytes(slots_.lane(flight.slot, slots_.rank()), mine, parts.bytes);
        slots_.meet(call, signature);
        for (int piece : spread_mine_) {
          for (std::size_t r = 0; r < ranks; ++r) inputs[r] = slots_.lane(flight.slot, static_cast<int>(r)) + parts.begin(piece);
          reduce_arrays(static_cast<std::int64_t>(parts.length(piece) / element), dtype, op, bytes_of(flight.own) + parts.begin(piece),
                        inputs.data(), slots_.size());
        }
        const Length length = [parts](int piece) { return parts.length(piece); };
        launch(call, flight, spread_, length, [&](const Route::Leg& leg, std::byte* to) {
          copy_bytes(to, bytes_of(flight.own) + parts.begin(leg.piece), parts.length(leg.piece));
        });
      },
      [&](std::uint64_t k) {
        const Parts parts = parts_of(k);
        Flight& flight = flights[k % 2];
        std::byte* whole = slots_.result(flight.slot);
        land(
            call, flight, spread_, [parts](int piece) { return parts.length(piece); },
            [&](const Route::Leg& leg, const std::byte* from) {
              partial(map_.host[static_cast<std::size_t>(leg.peer)], leg.piece) = from;
            });
        for (int piece : spread_mine_) {
          partial(host_, piece) = bytes_of(flight.own) + parts.begin(piece);
          reduce_arrays(static_cast<std::int64_t>(parts.length(piece) / element), dtype, op, whole + parts.begin(piece), &partial(0, piece),
                        map_.hosts());
        }
        slots_.meet(call, signature);
        copy_bytes(bytes_of(tensor) + chunks.offset(k), whole, parts.bytes);
      });
}

void HierarchicalTransport::all_reduce_sliced(const Call& call, at::Tensor& tensor, ReduceOp op) {
  const at::Tensor flat = tensor.detach().view({-1});
  const std::int64_t slice = (flat.numel() + world_ - 1) / world_;
  at::Tensor whole = flat;
  if (slice * world_ != flat.numel()) {
    whole = at::empty({slice * world_}, flat.options());
    copy_bytes(bytes_of(whole), bytes_of(flat), flat.nbytes());
    std::memset(bytes_of(whole) + flat.nbytes(), 0, whole.nbytes() - flat.nbytes());
  }
  at::Tensor mine = at::empty({slice}, flat.options());
  reduce_scatter(call, mine, whole, op);
  all_gather(call, whole, mine);
  if (!whole.is_same(flat)) copy_bytes(bytes_of(tensor), bytes_of(whole), flat.nbytes());
}

}  // namespace unshard::comm
