#include "comm/host_map.h"

#include <algorithm>

namespace unshard::comm {

namespace {

std::vector<int> numbered(const std::vector<std::string>& names) {
  std::vector<int> numbers;
  for (const auto& name : names) numbers.push_back(static_cast<int>(std::find(names.begin(), names.end(), name) - names.begin()));
  return numbers;
}

}  // namespace

HostMap::HostMap(const std::vector<std::string>& names) : HostMap(numbered(names)) {}

HostMap::HostMap(const std::vector<int>& numbers) {
  std::vector<int> seen;
  for (std::size_t rank = 0; rank < numbers.size(); ++rank) {
    const auto found = std::find(seen.begin(), seen.end(), numbers[rank]);
    const auto index = static_cast<std::size_t>(found - seen.begin());
    if (found == seen.end()) {
      seen.push_back(numbers[rank]);
      ranks.emplace_back();
    }
    host.push_back(static_cast<int>(index));
    local.push_back(static_cast<int>(ranks[index].size()));
    ranks[index].push_back(static_cast<int>(rank));
  }
}

HostMap HostMap::subset(const std::vector<int>& members) const {
  std::vector<int> numbers;
  for (int member : members) numbers.push_back(host[static_cast<std::size_t>(member)]);
  return HostMap(numbers);
}

HostMap blocks_of_ranks(const std::vector<int>& ranks_per_host) {
  std::vector<int> numbers;
  for (std::size_t host = 0; host < ranks_per_host.size(); ++host)
    numbers.insert(numbers.end(), static_cast<std::size_t>(ranks_per_host[host]), static_cast<int>(host));
  return HostMap(numbers);
}

}  // namespace unshard::comm
