#include "comm/communicator_impl.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/view_as_real.h>

#include <algorithm>
#include <numeric>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "comm/c10d_transport.h"
#include "comm/failure_text.h"
#include "comm/first_line.h"
#include "comm/gloo_group.h"
#include "comm/reduce_kernels.h"
#include "comm/shm_transport.h"
#include "comm/text_exchange.h"
#include "unshard/comm/departure.h"
#include "unshard/core/error.h"

namespace unshard::comm {

namespace {

std::string where(const char* op, std::string_view detail) { return Place{op, detail}.text(); }

void check_tensor(const char* op, std::string_view detail, const char* role, const at::Tensor& tensor) {
  require(tensor.defined(), where(op, detail), " ", role, " is undefined");
  require(tensor.layout() == at::kStrided && tensor.is_contiguous(), where(op, detail), " ", role, " of shape ", tensor.sizes(),
          " isn't contiguous; pass .contiguous()");
}

void check_pair(const char* op, std::string_view detail, const at::Tensor& output, const at::Tensor& input) {
  check_tensor(op, detail, "input", input);
  check_tensor(op, detail, "output", output);
  require(output.scalar_type() == input.scalar_type(), where(op, detail), " input is ", input.scalar_type(), ", output ",
          output.scalar_type());
  require(output.device() == input.device(), where(op, detail), " input is on ", input.device(), ", output on ", output.device());
}

bool has_complex_dtype(const at::Tensor& tensor) { return c10::isComplexType(tensor.scalar_type()); }

void check_reduction(const char* op, std::string_view detail, const at::Tensor& tensor, ReduceOp reduction) {
  if (has_complex_dtype(tensor)) {
    require(reduction == ReduceOp::sum, where(op, detail), " complex tensors have no order: only sum");
    return;
  }
  require(can_reduce(tensor.scalar_type(), reduction), where(op, detail), " ", tensor.scalar_type(), " can't be reduced",
          tensor.scalar_type() == at::kBool ? " by sum; use max (or) or min (and), or convert to an integer type" : "");
}

/// Real parts as a view, so that transports see numbers only.
at::Tensor as_real(const at::Tensor& tensor) { return has_complex_dtype(tensor) ? at::view_as_real(tensor.detach()) : tensor; }

/// `all`: one slice a rank; `output`: one a host, the sum over its ranks.
void add_by_host(at::Tensor& output, const at::Tensor& all, const HostMap& map) {
  const at::Tensor slices = all.view({map.world_size(), -1}), sums = output.view({map.hosts(), -1});
  for (int host = 0; host < map.hosts(); ++host) {
    const auto& ranks = map.ranks[static_cast<std::size_t>(host)];
    at::Tensor sum = slices.select(0, ranks[0]);
    if (c10::isReducedFloatingType(sum.scalar_type())) sum = sum.to(at::kFloat);
    for (std::size_t i = 1; i < ranks.size(); ++i) sum = sum.add(slices.select(0, ranks[i]));
    sums.select(0, host).copy_(sum);
  }
}

/// What the members of a sub-group that are on `rank`'s host are called in messages: their numbers in the sub-group.
Names names_of_subgroup(const std::vector<int>& members, const HostMap& map, int rank) {
  Names names{{}, static_cast<int>(members.size())};
  for (std::size_t i = 0; i < members.size(); ++i)
    if (map.host[static_cast<std::size_t>(members[i])] == map.host[static_cast<std::size_t>(rank)])
      names.ranks.push_back(static_cast<int>(i));
  return names;
}

std::vector<int> all_ranks(int size) {
  std::vector<int> ranks(static_cast<std::size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

void copy_all(at::Tensor& output, const at::Tensor& input) {
  if (output.data_ptr() != input.data_ptr()) output.detach().view({-1}).copy_(input.detach().view({-1}));
}

}  // namespace

CommunicatorImpl::CommunicatorImpl(Parts parts)
    : rank_(parts.rank),
      size_(parts.size),
      options_(std::move(parts.options)),
      map_(parts.map.host.empty() ? HostMap(std::vector<int>(static_cast<std::size_t>(std::max(parts.size, 1)), 0)) : std::move(parts.map)),
      local_(std::move(parts.local)),
      host_(map_.hosts() == 1 ? local_ : nullptr),
      group_(std::move(parts.group)),
      store_(std::move(parts.store)),
      health_(std::move(parts.health)),
      numbers_(parts.numbers.empty() ? all_ranks(parts.size) : std::move(parts.numbers)),
      loopback_(parts.loopback),
      timeline_(parts.timeline ? std::move(parts.timeline) : std::make_shared<Timeline>()),
      step_(parts.step ? std::move(parts.step) : std::make_shared<std::atomic<std::int64_t>>(0)),
      last_stall_report_(parts.last_stall_report ? std::move(parts.last_stall_report) : std::make_shared<std::atomic<std::int64_t>>(0)) {
  run_ranks_ = std::move(parts.run_ranks);
  for (int r = static_cast<int>(run_ranks_.size()); r < size_; ++r) run_ranks_.push_back(r);
  name_ = std::move(parts.name);
  if (options_.record && name_.empty()) name_ = cat("world ", options_.record->next_root());
  if (options_.record)
    record_id_ = options_.record->add([this] { return describe(); }, [this](std::string_view why) { fail(why); },
                                      [this](std::string_view group, std::string_view place) { hear_wait(group, place); });
  if (size_ == 1) return;
  if (host_) shared_memory_ = std::make_unique<ShmTransport>(host_);
  if (group_) {
    C10dOptions c10d{options_.timeout, options_.interrupt_check, {}, [this](bool also_in_order) { return ended_peer(also_in_order); }};
    if (spans_hosts()) c10d.sent = [this](std::int64_t bytes) { add_count(kHostLink, bytes); };
    c10d.waiting = [this](const Call& call, double waited_s) {
      call.is_pair() ? on_waiting_for(call.peer, call.op, call.detail, waited_s) : on_waiting(waited_s);
    };
    c10d.explain = [this](const Call& call) { return call.is_pair() ? explain_pair(call) : explain(); };
    c10d_ = std::make_unique<C10dTransport>(group_, rank_, size_, std::move(c10d));
    if (spans_hosts() && map_.hosts() < size_ && group_->hasBackendForDeviceType(c10::DeviceType::CPU))
      hierarchical_ = std::make_unique<HierarchicalTransport>(local_, *c10d_, map_, rank_);
  }
  if (!host_) {
    stall_ =
        std::make_unique<StallWatch>(store_, rank_, size_, options_.collective_check.count(), options_.timeout.count(), last_stall_report_);
    stall_->set_describe([this](int rank, const std::string& said, bool& waits) { return describe_rank(rank, said, waits); });
    const auto check = [this](std::string_view place) {
      if (const auto ended = ended_peer(false); !ended.empty())
        throw CommError(cat(place, " ", ended, "; this is rank ", rank_, " of ", size_, " in step ", step()));
      if (options_.interrupt_check) options_.interrupt_check();
      on_waiting(1);
    };
    const StoreRules rules{options_.timeout, check, [this] { return explain(); }};
    calls_ = std::make_unique<StoreExchange>(store_, "calls", rank_, size_, rules);
    strings_ = std::make_unique<StoreExchange>(store_, "strings", rank_, size_, rules);
  }
  if (local_) set_hooks();
}

void CommunicatorImpl::set_hooks() {
  local_->set_wait_hook([this](const Place& place, double waited_s) {
    if (waited_s >= 1) tell_wait(place.text());
    if (host_) return;
    const bool pair = place.op == "send" || place.op == "recv";  // with a rank of this host, of whose absence this host knows
    pair ? on_waiting_for(rank_, place.op, place.detail, waited_s) : on_waiting(waited_s);
  });
  local_->set_wait_end_hook([this] { end_wait(); });
  local_->set_describe_all([this](std::string ranks) {
    const std::string remote = describe_remote();
    return with_advice(cat(remote, remote.empty() ? "" : "; ", ranks));
  });
  local_->set_failure_hook([this](std::string_view error) { set_broken(error); });  // other hosts hear of it too
}

CommunicatorImpl::~CommunicatorImpl() {
  if (options_.record) options_.record->remove(record_id_);
  if (!local_) return;
  local_->set_wait_hook({});
  local_->set_wait_end_hook({});
  local_->set_describe_all({});
  local_->set_failure_hook({});
}

namespace {

// What a peer of this host says of its failure tells more than that its process ended.
std::string who_ended(const HostGroupImpl* local, const PeerHealth* health, const std::vector<int>& numbers, bool also_in_order) {
  if (local)
    if (auto ended = local->ended_peer(); !ended.empty()) return ended;
  return health ? health->ended(numbers, also_in_order) : std::string();
}

}  // namespace

std::string CommunicatorImpl::ended_peer(bool also_in_order) const {
  return who_ended(local_.get(), health_.get(), numbers_, also_in_order);
}

std::function<std::string()> CommunicatorImpl::watch_for_ends() const {
  return [local = std::weak_ptr(local_), health = std::weak_ptr(health_), numbers = numbers_] {
    return who_ended(local.lock().get(), health.lock().get(), numbers, false);
  };
}

std::function<std::string(int)> CommunicatorImpl::watch_ranks() const {
  return [health = std::weak_ptr(health_), numbers = numbers_, hosts = hosts(), self = rank_](int rank) {
    const auto place = static_cast<std::size_t>(rank);
    const auto known = health.lock();
    bool waits = false;
    if (!known || hosts[place] == hosts[static_cast<std::size_t>(self)]) return std::string();
    return known->describe(numbers.empty() ? rank : numbers[place], rank, waits);
  };
}

void CommunicatorImpl::fail(std::string_view reason) {
  set_broken(reason);
  if (local_) local_->fail(failure_to_tell(reason));
  if (options_.record) options_.record->fail(reason);
}

Transport& CommunicatorImpl::transport_for(const Call& call, const at::Tensor& tensor) const {
  if (shared_memory_ && tensor.is_cpu()) return *shared_memory_;
  if (hierarchical_ && tensor.is_cpu()) return *hierarchical_;
  require(c10d_ != nullptr, Place{call.op, call.detail}.text(), " no transport for tensors on ", tensor.device(),
          "; create the communicator over a c10d process group with a backend for them");
  return *c10d_;
}

void CommunicatorImpl::check_usable(const Call& call) const {
  if (!is_broken_.load(std::memory_order_acquire)) [[likely]]
    return;
  std::lock_guard<std::mutex> lock(broken_mutex_);
  throw CommError(cat(Place{call.op, call.detail}.text(), " this group can't be used any more; its first error was: ", broken_));
}

void CommunicatorImpl::set_broken(std::string_view reason) {
  std::lock_guard<std::mutex> lock(broken_mutex_);
  if (!is_broken_.load()) broken_ = failure_to_tell(reason);
  is_broken_.store(true, std::memory_order_release);
  // Peers may be waiting for this rank, which waited for another.
  if (spans_hosts()) local_->fail(broken_);
  if (health_)
    health_->fail(with_origin_called(broken_, [this](int rank) {
      return rank < size_ ? numbers_[static_cast<std::size_t>(rank)] : rank;  // which counts as the whole run does
    }));
}

void CommunicatorImpl::set_departure(std::string_view why) {
  const std::string text = failure_to_tell(why);
  if (local_) local_->set_departure(text);
  if (health_) health_->set_departure(text);
}

namespace {

/// Whose waits are this collective's.
class Performing {
 public:
  Performing(std::atomic<std::thread::id>* thread, StallWatch* stall) : thread_(thread), stall_(stall) {
    if (thread_ && stall_) thread_->store(std::this_thread::get_id(), std::memory_order_relaxed);
  }
  ~Performing() {
    if (thread_ && stall_) thread_->store({}, std::memory_order_relaxed);
  }
  /// It is through. Of one that failed the others can read where it was.
  void done() {
    if (thread_ && stall_) stall_->leave();
  }
  Performing(const Performing&) = delete;
  Performing& operator=(const Performing&) = delete;

 private:
  std::atomic<std::thread::id>* const thread_;
  StallWatch* const stall_;
};

}  // namespace

template <class Function>
void CommunicatorImpl::perform(std::string_view op, std::string_view detail, std::int64_t bytes, Function&& function) {
  const Call call{op, detail, step()};
  check_usable(call);
  const bool everyone = op != "send" && op != "recv";
  const std::uint64_t sequence = recorder_.begin(op, detail, bytes, call.step, everyone);
  const TimelineSpan span(*timeline_, Lane::collective, op, detail, bytes);
  if (everyone) performing_call_ = {op, detail, bytes};
  Performing performing(everyone ? &performing_ : nullptr, stall_.get());
  try {
    function(call);
  } catch (const std::invalid_argument&) {  // found before any communication
    recorder_.cancel(sequence);
    throw;
  } catch (const CommError& error) {
    set_broken(error.what());
    if (options_.record) options_.record->fail(error.what());
    throw;
  } catch (const std::exception& error) {
    set_broken(cat(error.what(), " in ", Place{op, detail}.text()));
    throw;
  } catch (...) {  // an interrupt of the caller's own kind
    set_broken(cat("interrupted in ", Place{op, detail}.text()));
    throw;
  }
  performing.done();
  end_wait();
  if (!everyone && stall_) stall_->leave();
  if (everyone && stall_) former_call_ = performing_call();
  recorder_.end(sequence);
  add_count(op, bytes);
}

void CommunicatorImpl::all_gather(at::Tensor& output, const at::Tensor& input, std::string_view detail) {
  check_pair("all_gather", detail, output, input);
  require(output.numel() == input.numel() * size_, where("all_gather", detail), " input has ", input.numel(), " elements, output ",
          output.numel(), "; wanted world_size (", size_, ") times the input");
  perform("all_gather", detail, share(output.nbytes()), [&](const Call& call) {
    if (size_ == 1) return copy_all(output, input);
    transport_for(call, input).all_gather(call, output, input);
  });
}

void CommunicatorImpl::reduce_scatter(at::Tensor& output, const at::Tensor& input, ReduceOp op, std::string_view detail) {
  check_pair("reduce_scatter", detail, output, input);
  check_reduction("reduce_scatter", detail, input, op);
  require(input.numel() == output.numel() * size_, where("reduce_scatter", detail), " input has ", input.numel(), " elements, output ",
          output.numel(), "; wanted world_size (", size_, ") times the output, pad to ", (input.numel() + size_ - 1) / size_ * size_);
  perform("reduce_scatter", detail, share(input.nbytes()), [&](const Call& call) {
    if (size_ == 1) return copy_all(output, input);
    at::Tensor to = as_real(output);
    transport_for(call, input).reduce_scatter(call, to, as_real(input), op);
  });
}

void CommunicatorImpl::reduce_scatter_by_host(at::Tensor& output, const at::Tensor& input, std::string_view detail) {
  constexpr const char* kOp = "reduce_scatter_by_host";
  check_pair(kOp, detail, output, input);
  check_reduction(kOp, detail, input, ReduceOp::sum);
  require(input.numel() * map_.hosts() == output.numel() * size_ && input.numel() % size_ == 0, where(kOp, detail), " input has ",
          input.numel(), " elements, output ", output.numel(), "; wanted slices for ", size_, " ranks and of ", map_.hosts(), " hosts");
  perform(kOp, detail, share(input.nbytes()), [&](const Call& call) {
    if (size_ == 1) return copy_all(output, input);
    at::Tensor to = as_real(output);
    const at::Tensor from = as_real(input);
    auto& transport = transport_for(call, input);
    if (&transport != c10d_.get() || map_.hosts() == size_) return transport.reduce_scatter_by_host(call, to, from);
    at::Tensor all = at::empty(from.sizes(), from.options());
    transport.all_to_all(call, all, from);
    add_by_host(to, all, map_);
  });
}

void CommunicatorImpl::all_reduce(at::Tensor& tensor, ReduceOp op, std::string_view detail) {
  check_tensor("all_reduce", detail, "tensor", tensor);
  check_reduction("all_reduce", detail, tensor, op);
  const auto padded = (tensor.numel() + size_ - 1) / size_ * size_ * static_cast<std::int64_t>(tensor.element_size());
  perform("all_reduce", detail, 2 * share(padded), [&](const Call& call) {
    if (size_ == 1) return;
    at::Tensor real = as_real(tensor);
    transport_for(call, tensor).all_reduce(call, real, op);
  });
}

void CommunicatorImpl::broadcast(at::Tensor& tensor, int root, std::string_view detail) {
  check_tensor("broadcast", detail, "tensor", tensor);
  require(root >= 0 && root < size_, where("broadcast", detail), " root ", root, " of ", size_, " ranks");
  const std::int64_t bytes = size_ > 1 && rank_ == root ? static_cast<std::int64_t>(tensor.nbytes()) : 0;
  perform("broadcast", detail, bytes, [&](const Call& call) {
    if (size_ > 1) transport_for(call, tensor).broadcast(call, tensor, root);
  });
}

void CommunicatorImpl::all_to_all(at::Tensor& output, const at::Tensor& input, std::string_view detail) {
  check_pair("all_to_all", detail, output, input);
  require(output.numel() == input.numel() && input.numel() % size_ == 0, where("all_to_all", detail), " input has ", input.numel(),
          " elements, output ", output.numel(), "; wanted equal and a multiple of world_size ", size_);
  require(size_ == 1 || input.numel() == 0 || output.data_ptr() != input.data_ptr(), where("all_to_all", detail),
          " output and input are the same memory");
  perform("all_to_all", detail, share(input.nbytes()), [&](const Call& call) {
    if (size_ == 1) return copy_all(output, input);
    transport_for(call, input).all_to_all(call, output, input);
  });
}

void CommunicatorImpl::check_peer(const char* op, int peer) const {
  require(peer >= 0 && peer < size_ && peer != rank_, "[comm.", op, "] peer rank ", peer, "; wanted another rank of ", size_, ", this is ",
          rank_);
}

void CommunicatorImpl::send(const at::Tensor& tensor, int destination, int tag) {
  check_tensor("send", {}, "tensor", tensor);
  check_peer("send", destination);
  const std::string detail = cat("to rank ", destination, ", tag ", tag);
  perform("send", detail, tensor.nbytes(), [&](const Call& call) {
    transport_for(call, tensor).send({call.op, call.detail, call.step, destination}, tensor, destination, tag);
  });
}

void CommunicatorImpl::recv(at::Tensor& tensor, int source, int tag) {
  check_tensor("recv", {}, "tensor", tensor);
  check_peer("recv", source);
  const std::string detail = cat("from rank ", source, ", tag ", tag);
  perform("recv", detail, 0, [&](const Call& call) {
    transport_for(call, tensor).recv({call.op, call.detail, call.step, source}, tensor, source, tag);
  });
}

void CommunicatorImpl::barrier(std::string_view place) {
  perform("barrier", place, 0, [&](const Call& call) {
    if (host_) {
      host_->barrier(place);
    } else if (hierarchical_) {
      hierarchical_->barrier(call);
    } else if (size_ > 1) {
      gather_strings(call, "");
    }
  });
}

// Over connections where there are some: a peer of another host that dies closes them, while the store would be waited for in vain.
std::vector<std::string> CommunicatorImpl::gather_strings(const Call& call, const std::string& mine) {
  if (!group_->hasBackendForDeviceType(c10::DeviceType::CPU)) return strings_->all_gather(mine, call.op);
  return exchange_texts(*c10d_, call, mine, size_);
}

std::vector<std::string> CommunicatorImpl::all_gather_strings(const std::string& mine) {
  std::vector<std::string> all{mine};
  perform("all_gather_strings", {}, size_ > 1 ? static_cast<std::int64_t>(mine.size()) : 0, [&](const Call& call) {
    if (size_ == 1) return;
    all = host_           ? host_->all_gather_strings(mine, call.op)
          : hierarchical_ ? hierarchical_->all_gather_strings(call, mine)
                          : gather_strings(call, mine);
  });
  return all;
}

void CommunicatorImpl::check_all_in(std::string_view call) {
  perform("check_all_in", call, 0, [&](const Call&) {
    if (size_ == 1) return;
    if (host_)
      host_->check_all_in(call, options_.collective_check);
    else
      calls_->check_all_in(call, options_.collective_check);
  });
}

c10::intrusive_ptr<c10d::Store> CommunicatorImpl::substore(std::string_view kind, std::string_view name) {
  return c10::make_intrusive<c10d::PrefixStore>(cat("unshard/", kind, "/", ++children_, "/", name), store_);
}

c10::intrusive_ptr<c10d::ProcessGroup> CommunicatorImpl::connect_group(const Call& call, const c10::intrusive_ptr<c10d::Store>& store,
                                                                       int rank, int size) {
  const auto raise = [&](std::string_view reason) {
    const std::string ranks = explain();
    throw CommError(cat(Place{call.op, call.detail}.text(), " ", reason, ranks.empty() ? "" : "; ", ranks, "; this is rank ", rank_, " of ",
                        size_, " in step ", call.step));
  };
  const auto watch = [&](double waited_s) {
    if (const auto ended = ended_peer(false); !ended.empty()) raise(ended);
    if (options_.interrupt_check) options_.interrupt_check();
    on_waiting(waited_s);
    if (waited_s > options_.timeout.count() + 5) raise(cat("no progress for ", options_.timeout.count(), " s"));  // Gloo's own comes first
  };
  std::string reason;
  try {
    return loopback_ ? make_loopback_group(store, rank, size, options_.timeout)
                     : make_gloo_group(store, rank, size, options_.timeout, watch);
  } catch (const CommError&) {
    throw;
  } catch (const std::runtime_error& error) {  // Gloo's own
    reason = first_line(error.what());
  } catch (const c10::Error& error) {
    reason = first_line(error.what());
  }
  for (int attempt = 0; attempt < 20; ++attempt) {  // the connection closes a moment before the process can be seen to have ended
    if (const auto ended = ended_peer(false); !ended.empty()) raise(ended);
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  raise(cat("a peer failed or timed out: ", reason));
  return {};
}

c10::intrusive_ptr<c10d::ProcessGroup> CommunicatorImpl::new_process_group(std::string_view name) {
  if (!store_) return {};
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  const auto store = substore("process_group", name);
  perform("new_process_group", name, 0, [&](const Call& call) { group = connect_group(call, store, rank_, size_); });
  return group;
}

std::shared_ptr<Communicator> CommunicatorImpl::subgroup(const std::vector<int>& ranks, std::string_view name) {
  require(!ranks.empty(), "[comm.subgroup '", name, "'] no ranks");
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    require(ranks[i] >= 0 && ranks[i] < size_, "[comm.subgroup '", name, "'] rank ", ranks[i], " of ", size_);
    require(std::count(ranks.begin(), ranks.end(), ranks[i]) == 1, "[comm.subgroup '", name, "'] rank ", ranks[i], " is listed twice");
  }
  std::shared_ptr<Communicator> result;
  perform("subgroup", name, 0, [&](const Call& call) {
    const auto self = std::find(ranks.begin(), ranks.end(), rank_);
    Parts parts;
    parts.rank = self == ranks.end() ? -1 : static_cast<int>(self - ranks.begin());
    parts.size = static_cast<int>(ranks.size());
    parts.options = options_;
    parts.loopback = loopback_;
    parts.timeline = timeline_;
    parts.step = step_;
    parts.last_stall_report = last_stall_report_;
    parts.name = cat(name_, " / ", name, " ", children_);
    for (int member : ranks) parts.run_ranks.push_back(run_ranks_[static_cast<std::size_t>(member)]);
    if (store_) parts.store = substore("subgroup", name);
    parts.map = map_.subset(ranks);
    parts.health = health_;
    for (int member : ranks) parts.numbers.push_back(numbers_[static_cast<std::size_t>(member)]);
    std::vector<int> here;  // numbers in the local group of this host's members
    for (int member : ranks)
      if (map_.host[static_cast<std::size_t>(member)] == map_.host[static_cast<std::size_t>(rank_)])
        here.push_back(map_.local[static_cast<std::size_t>(member)]);
    if (local_) parts.local = local_->subset(here, names_of_subgroup(ranks, map_, rank_));
    if (parts.rank < 0) return;
    if (!(parts.local && parts.map.hosts() == 1) && parts.size > 1) parts.group = connect_group(call, parts.store, parts.rank, parts.size);
    result = std::make_shared<CommunicatorImpl>(std::move(parts));
  });
  return result;
}

void CommunicatorImpl::add_count(std::string_view op, std::int64_t bytes) {
  std::lock_guard<std::mutex> lock(counts_mutex_);
  OpCount& count = counts_[std::string(op)];
  ++count.calls;
  count.bytes += bytes;
}

void CommunicatorImpl::reset_counts() {
  std::lock_guard<std::mutex> lock(counts_mutex_);
  counts_.clear();
}

}  // namespace unshard::comm

namespace unshard {

void set_departure(Communicator& comm, std::string_view why) {
  if (auto* one = dynamic_cast<comm::CommunicatorImpl*>(&comm)) one->set_departure(why);
}

}  // namespace unshard
