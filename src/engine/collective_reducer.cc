// Ranks whose memory isn't shared by all: one exchange a round brings every rank its slice of every host's sum, which it adds in the order
// of the hosts. A host's ranks add up theirs in shared memory first, so that one partial sum a destination crosses between two hosts; with
// one rank a host (or no shared memory) the slices come as they are. A thread of its own issues the exchanges, over a group of its own,
// while backward goes on.
//
// [Note: order of collectives] All ranks issue rounds in one total order: round by round, in each the buckets by index. Before the drain
// a rank issues only what it has posted and what is next in that order, so it has issued a prefix of the order; what a rank never posts
// stops it there. In the drain ranks learn each other's counts and prefixes and go on to the end, with zeros where they have nothing.
// After a zero_grad nothing more is issued until the drain, which first completes the longest prefix of the epoch that was dropped.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include "flat.h"
#include "reducer.h"
#include "spare_buffers.h"
#include "unshard/comm/communicator.h"
#include "unshard/core/error.h"

namespace unshard {
namespace {

struct Operation {
  std::uint32_t round = 0;
  int bucket = 0;
  bool dropped = false;  // completes an epoch that zero_grad ended: zeros in, result ignored
};

/// Shared with the thread, which may outlive the reducer when it is stuck in a collective whose peers are gone.
struct Exchange {
  explicit Exchange(std::int64_t spare_bytes) : spare(spare_bytes) {}
  std::shared_ptr<Communicator> group;
  int hosts = 1;
  std::vector<Bucket> buckets;
  c10::Device device{c10::kCPU};
  Reducer::Sink sink;
  std::function<void(int)> before_reduce;
  SpareBuffers spare;

  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::deque<at::Tensor>> posted;  // by bucket: rounds not yet issued
  std::uint64_t issued = 0;                    // operations of this epoch, a prefix of the total order
  bool frozen = true;                          // only the plan below is issued
  std::deque<Operation> remaining;             // the drain's plan
  std::uint64_t generation = 0;                // results of an older one are ignored
  bool busy = false, stop = false;
  std::exception_ptr error;

  std::mutex sink_mutex;  // held while the sink runs
};

bool next_operation(Exchange& state, Operation& operation) {
  if (!state.remaining.empty()) {
    operation = state.remaining.front();
    state.remaining.pop_front();
    return true;
  }
  if (state.frozen || state.buckets.empty()) return false;
  operation = {static_cast<std::uint32_t>(state.issued / state.buckets.size()), static_cast<int>(state.issued % state.buckets.size())};
  if (state.posted[operation.bucket].empty()) return false;
  ++state.issued;
  return true;
}

void give_to_sink(Exchange& state, int bucket, const at::Tensor& sums, std::uint64_t generation) {
  const auto numel = state.buckets[bucket].slice_numel;
  std::vector<at::Tensor> slices;
  for (int host = 0; host < state.hosts; ++host) slices.push_back(flat::slice(sums, numel * host, numel));
  const std::lock_guard adding(state.sink_mutex);
  {
    const std::lock_guard lock(state.mutex);
    if (state.generation != generation) return;
  }
  if (state.before_reduce) state.before_reduce(bucket);
  state.sink(bucket, slices);
}

void run_operation(Exchange& state, const Operation& operation, at::Tensor input, std::uint64_t generation) {
  const auto& bucket = state.buckets[operation.bucket];
  const int world = state.group->world_size();
  if (!input.defined()) input = flat::zeros(bucket.slice_numel * world, bucket.dtype, state.device);
  auto output = state.spare.take(bucket.slice_numel * state.hosts, bucket.dtype, state.device);
  // Where it throws, Gloo may still write to both: they aren't used again.
  state.group->reduce_scatter_by_host(output, input, bucket.label);
  state.spare.give_back(std::move(input));
  if (!operation.dropped) give_to_sink(state, operation.bucket, output, generation);
  state.spare.give_back(std::move(output));
}

void work(const std::shared_ptr<Exchange>& state) {
  std::unique_lock lock(state->mutex);
  while (!state->stop) {
    Operation operation;
    if (state->error || !next_operation(*state, operation)) {
      state->changed.wait(lock);
      continue;
    }
    at::Tensor input;
    auto& queue = state->posted[operation.bucket];
    if (!operation.dropped && !queue.empty()) {
      input = std::move(queue.front());
      queue.pop_front();
    }
    state->busy = true;
    const auto generation = state->generation;
    lock.unlock();
    std::exception_ptr error;
    try {
      run_operation(*state, operation, std::move(input), generation);
    } catch (...) {
      error = std::current_exception();  // rethrown by the next call of the main thread
    }
    lock.lock();
    state->busy = false;
    if (error && !state->error) state->error = error;
    state->changed.notify_all();
  }
}

class CollectiveReducer final : public Reducer {
 public:
  CollectiveReducer(const BucketPlan& plan, std::shared_ptr<Communicator> comm, c10::Device device, Sink sink,
                    const ReducerOptions& options)
      : plan_(plan),
        comm_(std::move(comm)),
        device_(device),
        options_(options),
        begun_(plan.buckets.size()),
        counts_(plan.buckets.size()),
        state_(std::make_shared<Exchange>(options.ring_bytes)) {
    std::vector<int> ranks(comm_->world_size());
    for (int r = 0; r < comm_->world_size(); ++r) ranks[r] = r;
    state_->group = comm_->subgroup(ranks, "gradients");
    const auto hosts = state_->group->hosts();
    state_->hosts = 1 + *std::max_element(hosts.begin(), hosts.end());
    state_->buckets = plan.buckets;
    state_->device = device;
    state_->sink = std::move(sink);
    state_->before_reduce = options.before_reduce;
    state_->posted.resize(plan.buckets.size());
    state_->frozen = !options.overlap;
    thread_ = std::thread([state = state_] { work(state); });
  }

  ~CollectiveReducer() override {
    bool busy = false;
    {
      const std::lock_guard lock(state_->mutex);
      state_->stop = true;
      busy = state_->busy;
      ++state_->generation;
    }
    // A result that is being added must be done before the accumulators go; one that is still travelling will be ignored.
    { const std::lock_guard adding(state_->sink_mutex); }
    state_->changed.notify_all();
    busy ? thread_.detach() : thread_.join();
  }

  at::Tensor begin(int bucket) override {
    const auto& planned = plan_.buckets[bucket];
    begun_[bucket] = state_->spare.take(planned.slice_numel * plan_.world_size, planned.dtype, device_);
    return begun_[bucket];
  }

  void post(int bucket) override {
    ++counts_[bucket];
    contributed_ = true;
    const std::lock_guard lock(state_->mutex);
    state_->posted[bucket].push_back(std::exchange(begun_[bucket], at::Tensor()));
    state_->changed.notify_all();
  }

  void poll() override {
    const std::lock_guard lock(state_->mutex);
    if (state_->error) std::rethrow_exception(state_->error);
  }

  void discard() override {
    for (auto& begun : begun_) begun = at::Tensor();
    std::fill(counts_.begin(), counts_.end(), 0);
    ++discards_;
    contributed_ = false;
    {
      const std::lock_guard lock(state_->mutex);
      state_->frozen = true;
      ++state_->generation;
      for (auto& queue : state_->posted) queue.clear();
    }
    const std::lock_guard adding(state_->sink_mutex);
  }

  void drain() override;

  std::int64_t bytes() const override {
    const std::lock_guard lock(state_->mutex);
    std::int64_t total = 0;
    for (int b = 0; b < static_cast<int>(begun_.size()); ++b) {
      total += plan_.bucket_bytes(b) * static_cast<std::int64_t>(begun_[b].defined() + state_->posted[b].size());
    }
    return total + state_->spare.bytes();
  }

 private:
  void plan_rest(const std::int64_t* all, std::size_t row);
  void check_for_interrupt();

  const BucketPlan& plan_;
  const std::shared_ptr<Communicator> comm_;
  const c10::Device device_;
  const ReducerOptions options_;
  std::vector<at::Tensor> begun_;     // by bucket
  std::vector<std::int64_t> counts_;  // by bucket: rounds posted in this epoch
  std::int64_t discards_ = 0;         // epochs that zero_grad ended since the last drain
  bool contributed_ = false;
  std::shared_ptr<Exchange> state_;
  std::thread thread_;
};

// Before each rank's row in the exchange of drain(): Gloo takes any message of the right length, and a rank in another collective would
// give numbers of rounds that are no such numbers.
constexpr std::int64_t kRoundsSign = 0x756e736861726401;

/// \throws CommError  a rank's row is another collective's message
void check_rows(Communicator& comm, const std::int64_t* all, std::size_t row) {
  for (int r = 0; r < comm.world_size(); ++r) {
    if (all[static_cast<std::size_t>(r) * row] == kRoundsSign) continue;
    throw CommError(cat("[comm.all_gather 'gradient rounds'] rank ", r, " is in another collective than engine.step() (step ", comm.step(),
                        "); all ranks must make the same collective calls in the same order"));
  }
}

// `all`: of each rank [discards, contributed, issued, counts...], `row` apart.
void CollectiveReducer::plan_rest(const std::int64_t* all, std::size_t row) {
  const int world = comm_->world_size();
  const auto buckets = static_cast<std::int64_t>(plan_.buckets.size());
  std::int64_t discards = 0, prefix = 0;
  for (int r = 0; r < world; ++r) discards = std::max(discards, all[r * row]);
  for (int r = 0; r < world; ++r) {
    prefix = std::max(prefix, all[r * row + 2]);
    if (all[r * row] == discards || !all[r * row + 1]) continue;
    throw CommError(cat("[engine.reduce] rank ", r, " called zero_grad() fewer times than other ranks since the last update (step ",
                        comm_->step(), "); call it at the same place on every rank"));
  }
  std::vector<std::int64_t> rounds(plan_.buckets.size());
  std::int64_t most = 0;
  for (std::int64_t b = 0; b < buckets; ++b) {
    for (int r = 0; r < world; ++r) rounds[b] = std::max(rounds[b], all[r * row + 3 + b]);
    most = std::max(most, rounds[b]);
  }
  const std::lock_guard lock(state_->mutex);
  auto skip = static_cast<std::int64_t>(state_->issued);
  if (discards > 0) {
    for (; skip < prefix; ++skip) {
      state_->remaining.push_back({static_cast<std::uint32_t>(skip / buckets), static_cast<int>(skip % buckets), true});
    }
    skip = 0;
  }
  for (std::int64_t k = 0; k < most; ++k) {
    for (std::int64_t b = 0; b < buckets; ++b) {
      // A prefix issued early has no gaps: whoever issued (k, b) had it, so it is in this list.
      if (k >= rounds[b] || k * buckets + b < skip) continue;
      state_->remaining.push_back({static_cast<std::uint32_t>(k), static_cast<int>(b)});
    }
  }
  state_->changed.notify_all();
}

// Who leaves here leaves the others in the middle of a step.
void CollectiveReducer::check_for_interrupt() {
  try {
    comm_->options().interrupt_check();
  } catch (const std::exception& interrupt) {
    const std::string why = cat(interrupt.what(), " in [engine.reduce], step ", comm_->step());
    comm_->fail(why);
    state_->group->fail(why);
    throw;
  }
}

void CollectiveReducer::drain() {
  const auto row = plan_.buckets.size() + 4;
  auto mine = flat::empty(static_cast<std::int64_t>(row), c10::ScalarType::Long, c10::kCPU);
  auto* sign = static_cast<std::int64_t*>(mine.data_ptr());
  auto* words = sign + 1;
  *sign = kRoundsSign;
  {
    const std::lock_guard lock(state_->mutex);
    if (state_->error) std::rethrow_exception(state_->error);
    state_->frozen = true;
    words[2] = static_cast<std::int64_t>(state_->issued);
  }
  words[0] = discards_;
  words[1] = contributed_;
  std::copy(counts_.begin(), counts_.end(), words + 3);
  auto all = flat::empty(mine.numel() * plan_.world_size, c10::ScalarType::Long, c10::kCPU);
  comm_->all_gather(all, mine, "gradient rounds");
  const auto* rows = static_cast<const std::int64_t*>(all.data_ptr());
  check_rows(*comm_, rows, row);
  plan_rest(rows + 1, row);

  std::unique_lock lock(state_->mutex);
  const auto done = [&] { return state_->error || (state_->remaining.empty() && !state_->busy); };
  while (!state_->changed.wait_for(lock, std::chrono::milliseconds(50), done)) {
    if (!comm_->options().interrupt_check) continue;
    lock.unlock();
    check_for_interrupt();
    lock.lock();
  }
  if (state_->error) std::rethrow_exception(state_->error);
  std::int64_t sent = 0, crossed = 0;
  for (const auto& [name, count] : state_->group->counts()) (name == kHostLink ? crossed : sent) += count.bytes;
  comm_->add_count("reduce_scatter", sent);
  if (crossed > 0) comm_->add_count(kHostLink, crossed);
  state_->group->reset_counts();
  state_->issued = 0;
  state_->frozen = !options_.overlap;
  std::fill(counts_.begin(), counts_.end(), 0);
  discards_ = 0;
  contributed_ = false;
}

}  // namespace

std::unique_ptr<Reducer> make_collective_reducer(const BucketPlan& plan, std::shared_ptr<Communicator> comm, c10::Device device,
                                                 Reducer::Sink sink, const ReducerOptions& options) {
  return std::make_unique<CollectiveReducer>(plan, std::move(comm), device, std::move(sink), options);
}

}  // namespace unshard
