#include "zero/plan.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <tuple>

#include "zero/occupancy.h"

namespace unshard::zero {
namespace {

/// One parameter from the touch that needs it to the touch after which it is let go.
struct Stay {
  int id = 0;
  std::size_t first_use = 0, last_use = 0;
  std::size_t not_before = 0;  // its last stay ended before this touch
  std::size_t from = 0;        // the touch during which its gather may start: first_use when it isn't gathered ahead
  bool at_head = false;        // it may start before the first touch
};

class Planner {
 public:
  Planner(const std::vector<int>& trace, const std::vector<PlanParameter>& parameters, const PlanOptions& options)
      : trace_(trace), parameters_(parameters), options_(options) {}

  Plan run() {
    plan_.release_after.assign(trace_.size(), 0);
    find_next_uses();
    choose_stays();
    gather_ahead();
    fuse();
    plan_.keeps_all = std::find(plan_.release_after.begin(), plan_.release_after.end(), 1) == plan_.release_after.end();
    return std::move(plan_);
  }

 private:
  std::int64_t numel(int id) const { return parameters_[static_cast<std::size_t>(id)].gather_numel; }

  void find_next_uses() {
    next_use_.assign(trace_.size(), trace_.size());
    elements_before_.assign(1, 0);
    std::vector<std::size_t> last(parameters_.size(), trace_.size());
    for (std::size_t p = 0; p < trace_.size(); ++p) {
      auto& before = last[static_cast<std::size_t>(trace_[p])];
      if (before < trace_.size()) next_use_[before] = p;
      before = p;
      elements_before_.push_back(elements_before_.back() + parameters_[static_cast<std::size_t>(trace_[p])].numel);
    }
  }

  bool reused_too_late(std::size_t position) const {
    const auto next = next_use_[position];
    return next < trace_.size() && elements_before_[next] - elements_before_[position + 1] > options_.max_reuse_distance;
  }

  // Which parameter is here from when to when, without gathering ahead.
  void choose_stays() {
    using Resident = std::tuple<std::size_t, std::int64_t, int>;  // next use, size, id: the last one leaves first
    std::set<Resident> residents;
    std::vector<std::size_t> stay_of(parameters_.size(), SIZE_MAX), left_after(parameters_.size(), 0);
    std::int64_t live = 0;
    const auto leave = [&](int id) {
      auto& stay = stay_of[static_cast<std::size_t>(id)];
      plan_.release_after[stays_[stay].last_use] = 1;
      left_after[static_cast<std::size_t>(id)] = stays_[stay].last_use + 1;
      stay = SIZE_MAX;
      live -= numel(id);
    };
    for (std::size_t p = 0; p < trace_.size(); ++p) {
      const int id = trace_[p];
      auto& stay = stay_of[static_cast<std::size_t>(id)];
      if (numel(id) == 0) continue;  // always here
      if (stay == SIZE_MAX) {
        while (live + numel(id) > options_.budget_numel && !residents.empty()) {
          leave(std::get<2>(*residents.rbegin()));
          residents.erase(std::prev(residents.end()));
        }
        stay = stays_.size();
        stays_.push_back({id, p, p, left_after[static_cast<std::size_t>(id)], p, false});
        live += numel(id);
        plan_.gathered_numel += numel(id);
      } else {
        residents.erase({p, numel(id), id});
        stays_[stay].last_use = p;
      }
      if (reused_too_late(p) || live > options_.budget_numel) {
        leave(id);
      } else {
        residents.insert({next_use_[p], numel(id), id});
      }
    }
    for (auto& stay : stays_) {
      if (!plan_.release_after[stay.last_use]) stay.last_use = trace_.size() - 1;
    }
  }

  // Elements here during each touch, without gathering ahead.
  std::vector<std::int64_t> occupied() const {
    std::vector<std::int64_t> amounts(trace_.size() + 1);  // first what each touch adds to the one before
    for (const auto& stay : stays_) {
      amounts[stay.first_use] += numel(stay.id);
      amounts[stay.last_use + 1] -= numel(stay.id);
    }
    std::partial_sum(amounts.begin(), amounts.end(), amounts.begin());
    amounts.pop_back();
    return amounts;
  }

  // Starts each gather as early as window and budget allow. Ahead of touch q are the gathers whose use comes later.
  void gather_ahead() {
    Occupancy occupancy(occupied());
    if (options_.prefetch_numel > 0) start_early(occupancy);
    plan_.peak_numel = occupancy.most();
  }

  void start_early(Occupancy& occupancy) {
    std::size_t oldest = 0, earliest = 0;  // the first stay in the window; where the one before started
    std::int64_t window = 0;
    for (std::size_t k = 0; k < stays_.size(); ++k) {
      auto& stay = stays_[k];
      window += numel(stay.id);
      // The window opens when uses begin. The very next gather may start whatever its size: it would otherwise never be ahead.
      while (window > options_.prefetch_numel && oldest < k) window -= numel(stays_[oldest++].id);
      const std::size_t opens = oldest == 0 ? 0 : stays_[oldest - 1].first_use;
      const auto bound = std::max({earliest, opens, stay.not_before});
      stay.from = occupancy.room_before(stay.first_use, bound, options_.budget_numel - numel(stay.id));
      occupancy.add(stay.from, stay.first_use, numel(stay.id));
      earliest = stay.from;
      stay.at_head = stay.from == 0 && oldest == 0;
    }
  }

  std::size_t issue_of(const Stay& stay) const {
    if (options_.prefetch_numel <= 0) return stay.first_use + 1;
    return stay.at_head ? 0 : stay.from + 1;  // touch `from` has begun: what it let go before has gone
  }

  void fuse() {
    std::int64_t bytes = 0;
    for (const auto& stay : stays_) {
      const auto more = parameters_[static_cast<std::size_t>(stay.id)].gather_bytes;
      const auto issue = issue_of(stay);
      // The message leaves when its last parameter may, which must not be later than the first one's use.
      if (!plan_.gathers.empty() && bytes + more <= options_.fuse_bytes && issue <= plan_.gathers.back().first_use) {
        plan_.gathers.back().issue = issue;
        plan_.gathers.back().last_use = stay.first_use;
        plan_.gathers.back().ids.push_back(stay.id);
        bytes += more;
        continue;
      }
      plan_.gathers.push_back({issue, stay.first_use, stay.first_use, {stay.id}});
      bytes = more;
    }
  }

  const std::vector<int>& trace_;
  const std::vector<PlanParameter>& parameters_;
  const PlanOptions& options_;
  std::vector<std::size_t> next_use_;
  std::vector<std::int64_t> elements_before_;
  std::vector<Stay> stays_;  // in the order of their first use
  Plan plan_;
};

}  // namespace

std::size_t Plan::gather_from(std::size_t position) const {
  const auto found = std::partition_point(gathers.begin(), gathers.end(), [&](const auto& gather) { return gather.first_use < position; });
  return static_cast<std::size_t>(found - gathers.begin());
}

Plan make_plan(const std::vector<int>& trace, const std::vector<PlanParameter>& parameters, const PlanOptions& options) {
  return Planner(trace, parameters, options).run();
}

}  // namespace unshard::zero
