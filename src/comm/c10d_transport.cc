#include "comm/c10d_transport.h"

#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <numeric>
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "comm/aside.h"
#include "comm/first_line.h"
#include "comm/gloo_group.h"
#include "comm/gloo_mismatch.h"
#include "comm/reduce_kernels.h"
#include "unshard/core/error.h"

namespace unshard::comm {

namespace {

using namespace std::chrono_literals;

constexpr std::int64_t kGatherPieceBytes = 1 << 20;

/// For an operation under way when a peer is known to have ended: what that peer sent is here, or about to be. An operation that needs
/// nothing more completes; one that needs more of that peer fails when the connection closes; only who waits for a third rank, which waits
/// for the one that ended, is told by this.
constexpr auto kGrace = 1s;

/// As bytes: Gloo lacks some dtypes, and movement doesn't care.
at::Tensor as_bytes(const at::Tensor& tensor) { return tensor.detach().view({-1}).view(at::kByte); }

c10d::ReduceOp::RedOpType native(ReduceOp op) {
  switch (op) {
    case ReduceOp::max:
      return c10d::ReduceOp::MAX;
    case ReduceOp::min:
      return c10d::ReduceOp::MIN;
    case ReduceOp::sum:
      break;
  }
  return c10d::ReduceOp::SUM;
}

std::string where(const Call& call) {
  return call.detail.empty() ? cat("[comm.", call.op, "]") : cat("[comm.", call.op, " '", call.detail, "']");
}

}  // namespace

C10dTransport::C10dTransport(c10::intrusive_ptr<c10d::ProcessGroup> group, int rank, int size, C10dOptions options)
    : group_(std::move(group)), rank_(rank), size_(size), options_(std::move(options)) {}
C10dTransport::~C10dTransport() = default;

void C10dTransport::raise(const Call& call, std::string_view reason) const {
  throw CommError(cat(where(call), " ", reason, "; this is rank ", rank_, " of ", size_, " in step ", call.step));
}

void C10dTransport::check_peers(const Call& call, bool also_in_order) const {
  if (!options_.ended) return;
  const std::string ended = options_.ended(also_in_order);
  if (!ended.empty()) raise(call, ended);
}

void C10dTransport::check_mismatch(const Call& call) const {
  const std::string mismatch = gloo_mismatch();
  if (mismatch.empty()) return;
  const std::string ranks = explain(call);
  raise(call, cat(ranks, ranks.empty() ? "" : "; ", mismatch));
}

void C10dTransport::check_peers_after(const Call& call, std::chrono::milliseconds grace, TimePoint& since) const {
  if (!options_.ended) return;
  const std::string ended = options_.ended(false);
  const auto now = std::chrono::steady_clock::now();
  since = ended.empty() ? TimePoint::max() : std::min(since, now);
  if (!ended.empty() && now - since >= grace) raise(call, ended);
}

c10::intrusive_ptr<c10d::Backend> C10dTransport::backend_for(const Call& call, const at::Tensor& tensor) const {
  const auto device = tensor.device().type();
  require(group_->hasBackendForDeviceType(device), where(call), " the process group has no backend for ", c10::DeviceTypeName(device, true),
          " tensors; create it with one (for example \"cpu:gloo,cuda:nccl\")");
  return group_->getBackend(device);
}

// Torch's and Gloo's errors become ours. The connection closes a moment before the process can be seen to have ended.
template <class Function>
void C10dTransport::translate(const Call& call, Function&& function) const {
  std::string reason;
  try {
    function();
    return;
  } catch (const CommError&) {  // ours, from a look around
    throw;
  } catch (const std::runtime_error& error) {  // Gloo's own
    reason = error.what();
  } catch (const c10::Error& error) {
    reason = error.what();
  }
  for (int attempt = 0; attempt < 20; ++attempt) {
    check_peers(call);
    std::this_thread::sleep_for(10ms);
  }
  check_peers(call, true);
  const std::string ranks = explain(call);
  raise(call, cat("a peer failed or timed out: ", ranks, ranks.empty() ? "" : "; ", first_line(reason)));
}

void C10dTransport::run(const Call& call, const at::Tensor& tensor, const Start& start) {
  const auto backend = backend_for(call, tensor);
  c10::intrusive_ptr<c10d::Work> work;
  translate(call, [&] { work = start(*backend); });
  if (tensor.is_cpu()) wait_or_abandon(call, *work);
  translate(call, [&] { work->wait(to_milliseconds(options_.timeout)); });
}

// A send or recv of one pair. Its work has no future to wait on, only a call that doesn't come back before Gloo's time-out.
void C10dTransport::run_pair(const Call& call, const at::Tensor& tensor, const Start& start) {
  if (!tensor.is_cpu()) return run(call, tensor, start);
  const auto backend = backend_for(call, tensor);
  c10::intrusive_ptr<c10d::Work> work;
  translate(call, [&] { work = start(*backend); });
  auto ended_since = TimePoint::max();
  try {
    translate(call, [&] {
      aside([work, limit = to_milliseconds(options_.timeout)] { work->wait(limit); },
            [&](double waited_s) { look_around(call, waited_s, ended_since); });
    });
  } catch (...) {
    (void)c10::intrusive_ptr<c10d::ProcessGroup>(group_).release();  // see wait_or_abandon()
    throw;
  }
}

void C10dTransport::look_around(const Call& call, double waited_s, TimePoint& ended_since) const {
  check_mismatch(call);
  check_peers_after(call, kGrace, ended_since);
  if (options_.interrupt_check) options_.interrupt_check();
  if (options_.waiting) options_.waiting(call, waited_s);
  if (waited_s > (options_.timeout + 5s).count()) {  // the backend's own time-out comes first
    const std::string ranks = explain(call);
    raise(call, cat("no progress for ", options_.timeout.count(), " s", ranks.empty() ? "" : ": ", ranks));
  }
}

// The end of a group waits for what is under way in it: for peers that may be waiting for this rank in the same way. So a group with an
// operation that this rank gave up on is never destroyed; its connections end with the process.
void C10dTransport::wait_or_abandon(const Call& call, c10d::Work& work) const {
  try {
    wait_for_report(call, work);
  } catch (...) {
    (void)c10::intrusive_ptr<c10d::ProcessGroup>(group_).release();
    throw;
  }
}

// Sleeps until the backend's thread reports, and looks at local peers and for interrupts in between.
void C10dTransport::wait_for_report(const Call& call, c10d::Work& work) const {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  try {
    future = work.getFuture();
  } catch (const c10::Error&) {
  }
  if (!future) return;
  struct Signal {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
  };
  const auto signal = std::make_shared<Signal>();
  future->addCallback([signal](c10::ivalue::Future&) {
    std::lock_guard<std::mutex> lock(signal->mutex);
    signal->done = true;
    signal->changed.notify_all();
  });
  const auto started = std::chrono::steady_clock::now();
  auto ended_since = std::chrono::steady_clock::time_point::max();
  for (;;) {
    {
      std::unique_lock<std::mutex> lock(signal->mutex);
      if (signal->changed.wait_for(lock, 50ms, [&] { return signal->done; })) return;
    }
    look_around(call, std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count(), ended_since);
  }
}

void C10dTransport::all_gather(const Call& call, at::Tensor& output, const at::Tensor& input) {
  at::Tensor to = as_bytes(output), from = as_bytes(input);
  if (to.numel() == 0) return;
  if (input.is_cpu() && from.numel() > kGatherPieceBytes)
    gather_in_pieces(call, to, from);
  else
    run(call, input, [&](c10d::Backend& backend) { return backend._allgather_base(to, from); });
  count_sent(input, from.numel() * (size_ - 1));
}

// Gloo sends a piece only when it has the one before from its neighbour: two under way hide the time that a message takes to arrive.
void C10dTransport::gather_in_pieces(const Call& call, at::Tensor& output, const at::Tensor& input) {
  const std::int64_t whole = input.numel(), most = std::min(whole, kGatherPieceBytes), count = (whole + most - 1) / most;
  const auto backend = backend_for(call, input);
  std::array<at::Tensor, 2> received{at::empty({most * size_}, at::kByte), at::empty({most * size_}, at::kByte)};
  std::array<Pending, 2> flights;
  const auto length = [&](std::int64_t k) { return std::min(most, whole - k * most); };
  const auto start = [&](std::int64_t k) {
    at::Tensor from = input.narrow(0, k * most, length(k)), to = received[k % 2].narrow(0, 0, length(k) * size_);
    translate(call, [&] { flights[k % 2] = std::make_shared<const c10::intrusive_ptr<c10d::Work>>(backend->_allgather_base(to, from)); });
  };
  start(0);
  for (std::int64_t k = 0; k < count; ++k) {
    if (k + 1 < count) start(k + 1);
    finish(call, flights[k % 2]);
    const auto* from = static_cast<const std::byte*>(received[k % 2].data_ptr());
    for (std::int64_t rank = 0; rank < size_; ++rank)
      std::memcpy(static_cast<std::byte*>(output.data_ptr()) + rank * whole + k * most, from + rank * length(k),
                  static_cast<std::size_t>(length(k)));
  }
}

void C10dTransport::all_to_all(const Call& call, at::Tensor& output, const at::Tensor& input) {
  at::Tensor to = as_bytes(output), from = as_bytes(input);
  if (to.numel() == 0) return;
  std::vector<std::int64_t> equal;
  run(call, input, [&](c10d::Backend& backend) { return backend.alltoall_base(to, from, equal, equal); });
  count_sent(input, from.numel() / size_ * (size_ - 1));
}

C10dTransport::Pending C10dTransport::start_exchange(const Call& call, at::Tensor& output, const at::Tensor& input,
                                                     const std::vector<std::int64_t>& receive, const std::vector<std::int64_t>& send) {
  at::Tensor to = output, from = input;
  auto receives = receive, sends = send;
  c10::intrusive_ptr<c10d::Work> work;
  const auto backend = backend_for(call, input);
  translate(call, [&] { work = backend->alltoall_base(to, from, receives, sends); });
  count_sent(input, std::accumulate(send.begin(), send.end(), std::int64_t{0}));
  return std::make_shared<const c10::intrusive_ptr<c10d::Work>>(std::move(work));
}

void C10dTransport::finish(const Call& call, const Pending& work) {
  wait_or_abandon(call, **work);
  translate(call, [&] { (*work)->wait(to_milliseconds(options_.timeout)); });
}

void C10dTransport::count_sent(const at::Tensor& tensor, std::int64_t bytes) const {
  if (options_.sent && tensor.is_cpu() && bytes > 0) options_.sent(bytes);
}

void C10dTransport::broadcast(const Call& call, at::Tensor& tensor, int root) {
  std::vector<at::Tensor> tensors{as_bytes(tensor)};
  if (tensors[0].numel() == 0) return;
  c10d::BroadcastOptions options;
  options.rootRank = root;
  run(call, tensor, [&](c10d::Backend& backend) { return backend.broadcast(tensors, options); });
  if (root == rank_) count_sent(tensor, tensors[0].numel() * (size_ - 1));  // passed on along a tree; all of it is the root's
}

void C10dTransport::send(const Call& call, const at::Tensor& tensor, int destination, int tag) {
  std::vector<at::Tensor> tensors{as_bytes(tensor)};
  run_pair(call, tensor, [&](c10d::Backend& backend) { return backend.send(tensors, destination, tag); });
  count_sent(tensor, tensors[0].numel());
}

void C10dTransport::recv(const Call& call, at::Tensor& tensor, int source, int tag) {
  std::vector<at::Tensor> tensors{as_bytes(tensor)};
  run_pair(call, tensor, [&](c10d::Backend& backend) { return backend.recv(tensors, source, tag); });
}

// Slices are exchanged as bytes and added here, in rank order. In pieces, so that the staging memory stays small for large inputs.
void C10dTransport::reduce_slices(const Call& call, const at::Tensor& output, const at::Tensor& input, ReduceOp op) {
  constexpr std::int64_t kWholeBytes = 64 << 20;
  const std::int64_t element = input.element_size(), slice = output.numel() * element, ranks = size_;
  if (slice == 0) return;
  const bool whole = slice * ranks <= kWholeBytes;
  const std::int64_t piece = whole ? slice : kWholeBytes / ranks / element * element;
  at::Tensor from_all = at::empty({piece * ranks}, at::kByte), to_all = whole ? as_bytes(input) : at::empty({piece * ranks}, at::kByte);
  std::vector<const void*> inputs(static_cast<std::size_t>(size_));
  std::vector<std::int64_t> equal;
  for (std::int64_t at = 0; at < slice; at += piece) {
    const std::int64_t bytes = std::min(piece, slice - at);
    if (!whole)
      for (std::int64_t r = 0; r < ranks; ++r)
        std::memcpy(static_cast<std::byte*>(to_all.data_ptr()) + r * bytes,
                    static_cast<const std::byte*>(input.data_ptr()) + r * slice + at, static_cast<std::size_t>(bytes));
    at::Tensor to = from_all.narrow(0, 0, bytes * ranks), from = to_all.narrow(0, 0, bytes * ranks);
    run(call, input, [&](c10d::Backend& backend) { return backend.alltoall_base(to, from, equal, equal); });
    count_sent(input, bytes * (ranks - 1));
    for (std::int64_t r = 0; r < ranks; ++r) inputs[static_cast<std::size_t>(r)] = static_cast<std::byte*>(to.data_ptr()) + r * bytes;
    reduce_arrays(bytes / element, input.scalar_type(), op, static_cast<std::byte*>(output.data_ptr()) + at, inputs.data(), size_);
  }
}

void C10dTransport::reduce_scatter(const Call& call, at::Tensor& output, const at::Tensor& input, ReduceOp op) {
  if (input.is_cpu()) return reduce_slices(call, output, input, op);
  at::Tensor to = output.detach().view({-1}), from = input.detach().view({-1});
  c10d::ReduceScatterOptions options;
  options.reduceOp = native(op);
  run(call, input, [&](c10d::Backend& backend) { return backend._reduce_scatter_base(to, from, options); });
}

void C10dTransport::all_reduce(const Call& call, at::Tensor& tensor, ReduceOp op) {
  if (!tensor.is_cpu()) {
    std::vector<at::Tensor> tensors{tensor.detach()};
    c10d::AllreduceOptions options;
    options.reduceOp = native(op);
    run(call, tensor, [&](c10d::Backend& backend) { return backend.allreduce(tensors, options); });
    return;
  }
  if (tensor.numel() == 0) return;
  const at::Tensor flat = tensor.detach().view({-1});
  const std::int64_t slice = (flat.numel() + size_ - 1) / size_;
  at::Tensor padded = flat;
  if (slice * size_ != flat.numel()) {
    padded = at::empty({slice * size_}, flat.options());
    padded.narrow(0, 0, flat.numel()).copy_(flat);
    padded.narrow(0, flat.numel(), slice * size_ - flat.numel()).zero_();
  }
  at::Tensor mine = at::empty({slice}, flat.options());
  reduce_slices(call, mine, padded, op);
  all_gather(call, padded, mine);
  if (!padded.is_same(flat)) flat.copy_(padded.narrow(0, 0, flat.numel()));
}

}  // namespace unshard::comm
