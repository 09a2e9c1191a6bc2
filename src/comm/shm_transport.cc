#include "comm/shm_transport.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "comm/reduce_kernels.h"
#include "unshard/core/error.h"

namespace unshard::comm {

namespace {

std::byte* bytes_of(const at::Tensor& tensor) { return static_cast<std::byte*>(tensor.data_ptr()); }

void copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (bytes && to != from) std::memcpy(to, from, bytes);
}

}  // namespace

/// `bytes` of one slice in pieces that fit `share` of a slot; at least one piece, so that empty tensors synchronise too.
struct ShmTransport::Split {
  std::size_t bytes, piece;
  std::uint64_t steps;

  Split(std::size_t slice_bytes, std::size_t parts_a_slot)
      : bytes(slice_bytes), piece(ShmLanes::kSlotBytes / parts_a_slot / kCacheLine * kCacheLine) {
    UNSHARD_DCHECK(piece > 0, "too many ranks for a slot");
    steps = std::max<std::uint64_t>(1, (bytes + piece - 1) / piece);
  }
  std::size_t offset(std::uint64_t k) const { return k * piece; }
  std::size_t length(std::uint64_t k) const { return std::min(piece, bytes - std::min(bytes, offset(k))); }
};

ShmTransport::ShmTransport(const std::shared_ptr<HostGroupImpl>& group)
    : lanes_(group), mailbox_(group), rank_(group->rank()), size_(group->size()) {}

// Peers' shares are read starting behind this rank, so that ranks don't all read the same lane at the same time.
void ShmTransport::all_gather(const Call& call, at::Tensor& output, const at::Tensor& input) {
  const Split split(input.nbytes(), 1);
  const std::uint64_t first = lanes_.begin(make_signature(call, input.nbytes(), static_cast<int>(input.scalar_type()), {}, 0), split.steps);
  const auto write = [&](std::uint64_t k) {
    std::byte* slot = lanes_.acquire(call, first + k);
    const std::byte* from = bytes_of(input) + split.offset(k);
    copy_bytes(slot, from, split.length(k));
    lanes_.post(first + k);
    copy_bytes(bytes_of(output) + static_cast<std::size_t>(rank_) * split.bytes + split.offset(k), from, split.length(k));
  };
  write(0);
  lanes_.compare_signatures(call, first);
  for (std::uint64_t k = 0; k < split.steps; ++k) {
    if (k + 1 < split.steps) write(k + 1);
    for (int i = 1; i < size_; ++i) {
      const int peer = (rank_ + i) % size_;
      const std::byte* slot = lanes_.read(call, peer, first + k);
      copy_bytes(bytes_of(output) + static_cast<std::size_t>(peer) * split.bytes + split.offset(k), slot, split.length(k));
    }
    lanes_.done(first + k);
  }
}

void ShmTransport::reduce_scatter(const Call& call, at::Tensor& output, const at::Tensor& input, ReduceOp op) {
  const Split split(output.nbytes(), static_cast<std::size_t>(size_));
  const auto dtype = input.scalar_type();
  const std::uint64_t first = lanes_.begin(make_signature(call, output.nbytes(), static_cast<int>(dtype), op, 0), split.steps);
  const auto slice = [&](int rank, std::uint64_t k) {
    return bytes_of(input) + static_cast<std::size_t>(rank) * split.bytes + split.offset(k);
  };
  const auto write = [&](std::uint64_t k) {
    std::byte* slot = lanes_.acquire(call, first + k);
    for (int peer = 0; peer < size_; ++peer)
      if (peer != rank_) copy_bytes(slot + static_cast<std::size_t>(peer) * split.piece, slice(peer, k), split.length(k));
    lanes_.post(first + k);
  };
  std::vector<const void*> inputs(static_cast<std::size_t>(size_));
  write(0);
  lanes_.compare_signatures(call, first);
  for (std::uint64_t k = 0; k < split.steps; ++k) {
    if (k + 1 < split.steps) write(k + 1);
    for (int peer = 0; peer < size_; ++peer)
      inputs[static_cast<std::size_t>(peer)] =
          peer == rank_ ? slice(rank_, k) : lanes_.read(call, peer, first + k) + static_cast<std::size_t>(rank_) * split.piece;
    reduce_arrays(static_cast<std::int64_t>(split.length(k) / input.element_size()), dtype, op, bytes_of(output) + split.offset(k),
                  inputs.data(), size_);
    lanes_.done(first + k);
  }
}

void ShmTransport::all_reduce(const Call& call, at::Tensor& tensor, ReduceOp op) {
  const auto signature = make_signature(call, tensor.nbytes(), static_cast<int>(tensor.scalar_type()), op, 0);
  if (tensor.nbytes() <= ShmLanes::kSlotBytes / 2 || size_ == 2)
    all_reduce_whole(call, tensor, op, signature);
  else
    all_reduce_sliced(call, tensor, op, signature);
}

/// Every rank sums everything itself: one exchange, the fastest for few bytes or two ranks.
void ShmTransport::all_reduce_whole(const Call& call, at::Tensor& tensor, ReduceOp op, const Signature& signature) {
  const Split split(tensor.nbytes(), 1);
  const std::uint64_t first = lanes_.begin(signature, split.steps);
  const auto write = [&](std::uint64_t k) {
    copy_bytes(lanes_.acquire(call, first + k), bytes_of(tensor) + split.offset(k), split.length(k));
    lanes_.post(first + k);
  };
  std::vector<const void*> inputs(static_cast<std::size_t>(size_));
  write(0);
  lanes_.compare_signatures(call, first);
  for (std::uint64_t k = 0; k < split.steps; ++k) {
    if (k + 1 < split.steps) write(k + 1);
    std::byte* mine = bytes_of(tensor) + split.offset(k);
    for (int peer = 0; peer < size_; ++peer)
      inputs[static_cast<std::size_t>(peer)] = peer == rank_ ? mine : lanes_.read(call, peer, first + k);
    reduce_arrays(static_cast<std::int64_t>(split.length(k) / tensor.element_size()), tensor.scalar_type(), op, mine, inputs.data(), size_);
    lanes_.done(first + k);
  }
}

/// Each rank sums its slice of every piece and hands the result round: two steps a piece, 2 (N-1)/N of the bytes read.
void ShmTransport::all_reduce_sliced(const Call& call, at::Tensor& tensor, ReduceOp op, const Signature& signature) {
  const Split split(tensor.nbytes(), 1);
  const std::size_t element = tensor.element_size();
  const std::uint64_t first = lanes_.begin(signature, 2 * split.steps);
  // Rank r's slice of a piece of `length` bytes: [slice_begin(r), slice_begin(r + 1)), in whole elements.
  const auto slice_begin = [&](std::size_t length, int rank) {
    return length / element * static_cast<std::size_t>(rank) / static_cast<std::size_t>(size_) * element;
  };
  const auto write = [&](std::uint64_t k) {
    copy_bytes(lanes_.acquire(call, first + 2 * k), bytes_of(tensor) + split.offset(k), split.length(k));
    lanes_.post(first + 2 * k);
  };
  std::vector<const void*> inputs(static_cast<std::size_t>(size_));
  write(0);
  lanes_.compare_signatures(call, first);
  for (std::uint64_t k = 0; k < split.steps; ++k) {
    const std::size_t length = split.length(k), begin = slice_begin(length, rank_), bytes = slice_begin(length, rank_ + 1) - begin;
    const std::uint64_t scatter = first + 2 * k, gather = scatter + 1;
    std::byte* piece = bytes_of(tensor) + split.offset(k);
    std::byte* result = lanes_.acquire(call, gather);
    for (int peer = 0; peer < size_; ++peer)
      inputs[static_cast<std::size_t>(peer)] = peer == rank_ ? piece + begin : lanes_.read(call, peer, scatter) + begin;
    reduce_arrays(static_cast<std::int64_t>(bytes / element), tensor.scalar_type(), op, result, inputs.data(), size_);
    lanes_.post(gather);
    lanes_.done(scatter);
    copy_bytes(piece + begin, result, bytes);
    if (k + 1 < split.steps) write(k + 1);
    for (int i = 1; i < size_; ++i) {
      const int peer = (rank_ + i) % size_;
      const std::size_t at = slice_begin(length, peer);
      copy_bytes(piece + at, lanes_.read(call, peer, gather), slice_begin(length, peer + 1) - at);
    }
    lanes_.done(gather);
  }
}

void ShmTransport::broadcast(const Call& call, at::Tensor& tensor, int root) {
  const Split split(tensor.nbytes(), 1);
  const std::uint64_t first =
      lanes_.begin(make_signature(call, tensor.nbytes(), static_cast<int>(tensor.scalar_type()), {}, root), split.steps);
  const auto write = [&](std::uint64_t k) {
    std::byte* slot = lanes_.acquire(call, first + k);
    if (rank_ == root) copy_bytes(slot, bytes_of(tensor) + split.offset(k), split.length(k));
    lanes_.post(first + k);
  };
  write(0);
  lanes_.compare_signatures(call, first);
  for (std::uint64_t k = 0; k < split.steps; ++k) {
    if (k + 1 < split.steps) write(k + 1);
    if (rank_ != root) copy_bytes(bytes_of(tensor) + split.offset(k), lanes_.read(call, root, first + k), split.length(k));
    lanes_.done(first + k);
  }
}

void ShmTransport::all_to_all(const Call& call, at::Tensor& output, const at::Tensor& input) {
  const auto ranks = static_cast<std::size_t>(size_);
  const Split split(input.nbytes() / ranks, ranks);
  const std::uint64_t first = lanes_.begin(make_signature(call, input.nbytes(), static_cast<int>(input.scalar_type()), {}, 0), split.steps);
  const auto at = [&](const at::Tensor& tensor, int rank, std::uint64_t k) {
    return bytes_of(tensor) + static_cast<std::size_t>(rank) * split.bytes + split.offset(k);
  };
  const auto write = [&](std::uint64_t k) {
    std::byte* slot = lanes_.acquire(call, first + k);
    for (int peer = 0; peer < size_; ++peer)
      if (peer != rank_) copy_bytes(slot + static_cast<std::size_t>(peer) * split.piece, at(input, peer, k), split.length(k));
    lanes_.post(first + k);
    copy_bytes(at(output, rank_, k), at(input, rank_, k), split.length(k));
  };
  write(0);
  lanes_.compare_signatures(call, first);
  for (std::uint64_t k = 0; k < split.steps; ++k) {
    if (k + 1 < split.steps) write(k + 1);
    for (int i = 1; i < size_; ++i) {
      const int peer = (rank_ + i) % size_;
      copy_bytes(at(output, peer, k), lanes_.read(call, peer, first + k) + static_cast<std::size_t>(rank_) * split.piece, split.length(k));
    }
    lanes_.done(first + k);
  }
}

void ShmTransport::send(const Call& call, const at::Tensor& tensor, int destination, int tag) {
  mailbox_.send(call, bytes_of(tensor), tensor.nbytes(), destination, tag);
}

void ShmTransport::recv(const Call& call, at::Tensor& tensor, int source, int tag) {
  mailbox_.recv(call, bytes_of(tensor), tensor.nbytes(), source, tag);
}

}  // namespace unshard::comm
