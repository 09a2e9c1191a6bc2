// Ranks of one host: buckets are written into shared memory, and each rank sums its own slice of them, in its own thread's time, as soon
// as all ranks have posted. Nothing is sent.
//
// [Note: full ring] A rank that runs ahead fills its ring. It then waits while some peer is computing in backward (which will consume).
// When every peer is blocked or elsewhere, nobody may be left to consume: ranks whose branches differ could each wait for a bucket the
// other has no room to post. So the rank goes on in private memory ("spills") and posts later, in the drain at the latest.
//
// [Note: no deadlock in the drain] All ranks are in it and have declared how many rounds of each bucket they have. Spilled rounds are
// posted in one order, (round, bucket); the slot kept for drains takes the lowest one that found no other. The lowest (round, bucket) that
// is not yet reduced everywhere is therefore posted by every rank that has it, so all ranks reduce it, its slots become free, and the next
// follows.
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <string>
#include <utility>

#include "flat.h"
#include "gradient_board.h"
#include "reducer.h"
#include "unshard/comm/communicator.h"
#include "unshard/comm/host_group.h"
#include "unshard/core/error.h"

namespace unshard {
namespace {

constexpr int kPrivate = -1;

class SharedReducer final : public Reducer {
 public:
  SharedReducer(const BucketPlan& plan, Communicator& comm, Sink sink, const ReducerOptions& options)
      : plan_(plan),
        comm_(comm),
        host_(*comm.host()),
        sink_(std::move(sink)),
        options_(options),
        rank_(comm.rank()),
        world_(comm.world_size()),
        board_(host_, plan, options.ring_bytes),
        begun_(plan.buckets.size()),
        posted_(plan.buckets.size()),
        reduced_(plan.buckets.size()),
        read_(world_),
        arrived_(world_),
        held_(world_) {
    for (int slot = 0; slot + 1 < board_.slots(); ++slot) free_.push_back(slot);
    for (auto& buckets : arrived_) buckets.resize(plan.buckets.size());
    for (auto& slots : held_) slots.resize(board_.slots());
  }

  at::Tensor begin(int bucket) override {
    auto& begun = begun_[bucket];
    begun.slot = acquire();
    const auto& planned = plan_.buckets[bucket];
    const auto numel = planned.slice_numel * world_;
    begun.memory =
        begun.slot == kPrivate ? flat::empty(numel, planned.dtype, at::kCPU) : over(board_.slot(rank_, begun.slot), bucket, numel);
    return begun.memory;
  }

  void post(int bucket) override {
    auto begun = std::exchange(begun_[bucket], {});
    const auto round = posted_[bucket]++;
    if (begun.slot == kPrivate) {
      spilled_.push_back({bucket, round, begun.memory});
    } else {
      publish(bucket, round, begun.slot);
    }
  }

  void poll() override {
    if (!options_.overlap) return;
    post_spilled();
    if (read_logs()) reduce_ready();
  }

  void discard() override {
    for (auto& begun : begun_) {
      if (begun.memory.defined() && begun.slot != kPrivate) free_.push_back(begun.slot);
      begun = {};
    }
    spilled_.clear();
    declare();
    next_epoch(epoch_ + 1);
    forget_past();
  }

  void drain() override;
  int find_nonfinite(int bucket, std::int64_t offset, std::int64_t numel) override;

  std::int64_t bytes() const override {
    std::int64_t total = board_.ring_bytes();
    for (const auto& spilled : spilled_) total += plan_.bucket_bytes(spilled.bucket);
    return total;
  }

 private:
  struct Begun {
    int slot = kPrivate;
    at::Tensor memory;
  };
  struct Spilled {
    int bucket;
    std::uint32_t round;
    at::Tensor memory;
  };

  at::Tensor over(std::byte* data, int bucket, std::int64_t numel) const {
    return at::from_blob(data, {numel}, at::TensorOptions().dtype(plan_.buckets[bucket].dtype));
  }
  std::string where(const char* what) const { return cat("gradients: ", what, ", step ", comm_.step()); }

  // Slots.
  void collect_free();
  int take_free();
  int acquire();
  bool peer_is_computing() const;
  void publish(int bucket, std::uint32_t round, int slot);
  bool post_spilled(bool draining = false);

  // Reducing.
  bool read_logs();
  bool no_round_from(int peer, int bucket, std::uint32_t round) const;
  bool try_reduce(int bucket);
  bool reduce_ready();
  void consume(int peer, int slot) { board_.consumed(peer, slot).fetch_add(1, std::memory_order_acq_rel); }
  void forget_past();

  // Epochs.
  void declare();
  void next_epoch(std::uint64_t epoch);
  bool all_draining() const;
  void agree_on_epoch();
  bool all_reduced() const;
  std::uint64_t events() const;  ///< what others may change while this rank waits in the drain, as one number

  const BucketPlan& plan_;
  Communicator& comm_;
  HostGroup& host_;
  const Sink sink_;
  const ReducerOptions options_;
  const int rank_, world_;
  GradientBoard board_;

  std::uint64_t epoch_ = 0, drains_ = 0;
  std::vector<Begun> begun_;                     // by bucket
  std::vector<std::uint32_t> posted_, reduced_;  // by bucket: rounds of this epoch
  std::vector<int> free_;                        // own slots
  std::deque<int> outstanding_;                  // own slots that peers may still read, oldest first
  bool drain_slot_used_ = false;
  std::deque<Spilled> spilled_;
  std::vector<std::uint64_t> read_;                                     // by rank: entries read of its log
  std::vector<std::vector<std::deque<GradientBoard::Entry>>> arrived_;  // by rank and bucket: posted, not yet reduced
  struct Held {
    int bucket = -1;
    std::uint64_t epoch = 0;
  };
  std::vector<std::vector<Held>> held_;  // by rank and slot: what was last reduced from it
  std::vector<int> dirty_;               // buckets with news
  std::uint64_t collected_ = 0;          // outstanding slots that all ranks have consumed, so far
};

void SharedReducer::collect_free() {
  const auto all = static_cast<std::uint32_t>(world_);
  for (auto slot = outstanding_.begin(); slot != outstanding_.end();) {
    if (board_.consumed(rank_, *slot).load(std::memory_order_acquire) < all) {
      ++slot;
      continue;
    }
    if (*slot == board_.slots() - 1) {
      drain_slot_used_ = false;
    } else {
      free_.push_back(*slot);
    }
    slot = outstanding_.erase(slot);
    ++collected_;
  }
}

int SharedReducer::take_free() {
  if (free_.empty()) collect_free();
  if (free_.empty()) return kPrivate;
  const int slot = free_.back();
  free_.pop_back();
  return slot;
}

bool SharedReducer::peer_is_computing() const {
  for (int r = 0; r < world_; ++r) {
    if (r != rank_ && host_.phase_of(r) == Phase::backward) return true;
  }
  return false;
}

// See [Note: full ring]. Spilled rounds go first, so that a bucket's rounds are posted in order.
int SharedReducer::acquire() {
  post_spilled();
  if (spilled_.empty()) {
    if (const int slot = take_free(); slot != kPrivate) return slot;
  }
  if (!options_.overlap) return kPrivate;  // nothing is consumed before the drain
  const std::string place = where("waiting for room in the bucket ring");
  const TimelineSpan span(comm_.timeline(), Lane::reduce, "room in the bucket ring");
  host_.set_phase(Phase::blocked, comm_.step(), place);
  host_.notify();
  int slot = kPrivate;
  while (slot == kPrivate) {
    if (read_logs()) reduce_ready();
    collect_free();
    post_spilled();
    if (spilled_.empty()) slot = take_free();
    if (slot != kPrivate || !peer_is_computing()) break;
    host_.wait_until(
        [this] {
          for (const int own : outstanding_) {
            if (board_.consumed(rank_, own).load(std::memory_order_acquire) >= static_cast<std::uint32_t>(world_)) return true;
          }
          for (int r = 0; r < world_; ++r) {
            if (board_.rank(r).posted.load(std::memory_order_acquire) != read_[r]) return true;
          }
          return !peer_is_computing();
        },
        place);
  }
  host_.set_phase(Phase::backward, comm_.step(), {});
  host_.notify();
  return slot;
}

void SharedReducer::publish(int bucket, std::uint32_t round, int slot) {
  auto& mine = board_.rank(rank_);
  board_.consumed(rank_, slot).store(0, std::memory_order_relaxed);
  const auto index = mine.posted.load(std::memory_order_relaxed);
  board_.entry(rank_, index) = {epoch_, static_cast<std::uint32_t>(bucket), round, static_cast<std::uint32_t>(slot)};
  outstanding_.push_back(slot);
  mine.posted.store(index + 1, std::memory_order_release);
  comm_.add_count("reduce_scatter", plan_.bucket_bytes(bucket) * (world_ - 1) / world_);
  host_.notify();
}

bool SharedReducer::post_spilled(bool draining) {
  bool any = false;
  while (!spilled_.empty()) {
    int slot = take_free();
    if (slot == kPrivate && draining) {
      collect_free();
      if (!drain_slot_used_) slot = board_.slots() - 1;
    }
    if (slot == kPrivate) break;
    drain_slot_used_ = drain_slot_used_ || slot == board_.slots() - 1;
    const auto spilled = std::move(spilled_.front());
    spilled_.pop_front();
    flat::copy(over(board_.slot(rank_, slot), spilled.bucket, spilled.memory.numel()), spilled.memory);
    publish(spilled.bucket, spilled.round, slot);
    any = true;
  }
  return any;
}

bool SharedReducer::read_logs() {
  bool news = false;
  for (int r = 0; r < world_; ++r) {
    const auto posted = board_.rank(r).posted.load(std::memory_order_acquire);
    for (; read_[r] < posted; ++read_[r]) {
      const auto entry = board_.entry(r, read_[r]);
      news = true;
      if (entry.epoch < epoch_) {  // dropped here by zero_grad
        consume(r, static_cast<int>(entry.slot));
        host_.notify();
        continue;
      }
      arrived_[r][entry.bucket].push_back(entry);
      dirty_.push_back(static_cast<int>(entry.bucket));
    }
  }
  return news;
}

bool SharedReducer::no_round_from(int peer, int bucket, std::uint32_t round) const {
  const auto declared = board_.rank(peer).declared.load(std::memory_order_acquire);
  if (declared <= epoch_) return false;
  // Later than the next epoch: it has dropped this one (zero_grad), as this rank is about to. A peer that only left the drain early still
  // shows the counts of this epoch, and what it posted must be waited for even if its log was read too early to show it.
  return declared > epoch_ + 1 || board_.count(peer, bucket).load(std::memory_order_relaxed) <= round;
}

bool SharedReducer::try_reduce(int bucket) {
  const auto round = reduced_[bucket];
  std::vector<at::Tensor> slices;
  const auto& planned = plan_.buckets[bucket];
  for (int r = 0; r < world_; ++r) {
    const auto& queue = arrived_[r][bucket];
    if (!queue.empty() && queue.front().epoch == epoch_ && queue.front().round == round) {
      auto* data = board_.slot(r, static_cast<int>(queue.front().slot));
      data += static_cast<std::size_t>(planned.slice_numel) * rank_ * c10::elementSize(planned.dtype);
      slices.push_back(over(data, bucket, planned.slice_numel));
    } else if (!no_round_from(r, bucket, round)) {
      return false;
    }
  }
  if (slices.empty()) return false;
  if (options_.before_reduce) options_.before_reduce(bucket);
  sink_(bucket, slices);
  for (int r = 0; r < world_; ++r) {
    auto& queue = arrived_[r][bucket];
    if (queue.empty() || queue.front().epoch != epoch_ || queue.front().round != round) continue;
    held_[r][queue.front().slot] = {bucket, epoch_};
    consume(r, static_cast<int>(queue.front().slot));
    queue.pop_front();
  }
  ++reduced_[bucket];
  return true;
}

bool SharedReducer::reduce_ready() {
  bool any = false;
  for (const int bucket : std::exchange(dirty_, {})) {
    while (try_reduce(bucket)) any = true;
  }
  if (any) host_.notify();
  return any;
}

// Free the slots of rounds that belong to an epoch this rank has left.
void SharedReducer::forget_past() {
  for (int r = 0; r < world_; ++r) {
    for (auto& queue : arrived_[r]) {
      while (!queue.empty() && queue.front().epoch < epoch_) {
        consume(r, static_cast<int>(queue.front().slot));
        queue.pop_front();
      }
    }
  }
  host_.notify();
}

void SharedReducer::declare() {
  for (int b = 0; b < static_cast<int>(posted_.size()); ++b) board_.count(rank_, b).store(posted_[b], std::memory_order_relaxed);
  board_.rank(rank_).declared.store(epoch_ + 1, std::memory_order_release);
}

void SharedReducer::next_epoch(std::uint64_t epoch) {
  epoch_ = epoch;
  std::fill(posted_.begin(), posted_.end(), 0);
  std::fill(reduced_.begin(), reduced_.end(), 0);
  board_.rank(rank_).epoch.store(epoch, std::memory_order_release);
}

bool SharedReducer::all_draining() const {
  for (int r = 0; r < world_; ++r) {
    if (board_.rank(r).drains.load(std::memory_order_acquire) < drains_) return false;
  }
  return true;
}

// All ranks have begun this drain. A rank behind in epochs that has contributed nothing follows; anything else is a caller's mistake.
void SharedReducer::agree_on_epoch() {
  std::uint64_t latest = 0;
  for (int r = 0; r < world_; ++r) latest = std::max(latest, board_.rank(r).drain_epoch.load(std::memory_order_acquire));
  for (int r = 0; r < world_; ++r) {
    const auto& other = board_.rank(r);
    if (other.drain_epoch.load(std::memory_order_acquire) == latest || !other.contributed.load(std::memory_order_acquire)) continue;
    throw CommError(cat("[engine.reduce] rank ", r, " called zero_grad() fewer times than other ranks since the last update (step ",
                        comm_.step(), "); call it at the same place on every rank"));
  }
  if (epoch_ == latest) return;
  next_epoch(latest);
  declare();
  forget_past();
  host_.notify();
}

bool SharedReducer::all_reduced() const {
  for (int r = 0; r < world_; ++r) {
    if (board_.rank(r).declared.load(std::memory_order_acquire) <= epoch_) return false;
    for (int b = 0; b < static_cast<int>(reduced_.size()); ++b) {
      if (board_.count(r, b).load(std::memory_order_relaxed) > reduced_[b]) return false;
    }
  }
  return true;
}

// Every term only grows, also where a slot is collected: equal sums mean that nothing happened in between.
std::uint64_t SharedReducer::events() const {
  std::uint64_t sum = collected_ * static_cast<std::uint64_t>(world_);
  for (int r = 0; r < world_; ++r) {
    const auto& other = board_.rank(r);
    sum += other.posted.load(std::memory_order_acquire) + other.declared.load(std::memory_order_acquire) +
           other.drains.load(std::memory_order_acquire) + other.epoch.load(std::memory_order_acquire);
  }
  for (const int own : outstanding_) sum += board_.consumed(rank_, own).load(std::memory_order_acquire);
  return sum;
}

void SharedReducer::drain() {
  std::uint64_t contributed = 0;
  for (const auto rounds : posted_) contributed |= rounds > 0;
  std::stable_sort(spilled_.begin(), spilled_.end(),
                   [](const Spilled& a, const Spilled& b) { return std::pair(a.round, a.bucket) < std::pair(b.round, b.bucket); });
  auto& mine = board_.rank(rank_);
  declare();
  mine.drain_epoch.store(epoch_, std::memory_order_release);
  mine.contributed.store(contributed, std::memory_order_release);
  mine.drains.store(++drains_, std::memory_order_release);
  host_.notify();

  bool agreed = false;
  const std::string place = where("waiting for all ranks' gradients");
  while (true) {
    const auto before = events();
    if (!agreed && all_draining()) {
      agree_on_epoch();
      agreed = true;
    }
    bool progress = post_spilled(true);
    progress |= read_logs();
    // What a peer has not got is known only now: every bucket may have become ready, not only those with news.
    for (int b = 0; b < static_cast<int>(reduced_.size()); ++b) dirty_.push_back(b);
    progress |= reduce_ready();
    if (agreed && spilled_.empty() && all_reduced()) break;
    if (progress) continue;
    if (options_.before_wait) options_.before_wait();
    host_.wait_until([&] { return events() != before; }, place);
  }
  next_epoch(epoch_ + 1);
}

int SharedReducer::find_nonfinite(int bucket, std::int64_t offset, std::int64_t numel) {
  const auto& planned = plan_.buckets[bucket];
  for (int r = 0; r < world_; ++r) {
    for (int slot = 0; slot < board_.slots(); ++slot) {
      if (held_[r][slot].bucket != bucket || held_[r][slot].epoch + 1 != epoch_) continue;
      auto* data = board_.slot(r, slot);
      data += static_cast<std::size_t>(planned.slice_numel * rank_ + offset) * c10::elementSize(planned.dtype);
      if (!flat::sum_of_squares(over(data, bucket, numel)).finite) return r;
    }
  }
  return -1;
}

}  // namespace

std::unique_ptr<Reducer> make_shared_reducer(const BucketPlan& plan, Communicator& comm, Reducer::Sink sink,
                                             const ReducerOptions& options) {
  return std::make_unique<SharedReducer>(plan, comm, std::move(sink), options);
}

}  // namespace unshard
