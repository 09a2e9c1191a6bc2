#pragma once
// Which rank is on which host. Hosts are numbered in the order of their first rank; ranks of a host need not be neighbours.
#include <string>
#include <vector>

namespace unshard::comm {

struct HostMap {
  std::vector<int> host;                ///< by rank
  std::vector<int> local;               ///< by rank: its number among its host's ranks
  std::vector<std::vector<int>> ranks;  ///< by host, ascending

  HostMap() = default;
  /// `names`: of each rank's host, by rank; equal names are one host.
  explicit HostMap(const std::vector<std::string>& names);
  /// By numbers that mean no more than equal or different.
  explicit HostMap(const std::vector<int>& numbers);

  int hosts() const { return static_cast<int>(ranks.size()); }
  int world_size() const { return static_cast<int>(host.size()); }
  int size(int of_host) const { return static_cast<int>(ranks[static_cast<std::size_t>(of_host)].size()); }
  const std::vector<int>& neighbours(int rank) const { return ranks[static_cast<std::size_t>(host[static_cast<std::size_t>(rank)])]; }
  /// The map of a sub-group: its rank i is `members[i]` here.
  HostMap subset(const std::vector<int>& members) const;
};

/// "2,2" and "1,3" style: rank order, so many on each host.
HostMap blocks_of_ranks(const std::vector<int>& ranks_per_host);

}  // namespace unshard::comm
