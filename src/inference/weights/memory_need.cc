#include "inference/weights/memory_need.h"

#include <fstream>

namespace unshard::inference {

std::int64_t available_bytes() {
  std::ifstream file("/proc/meminfo");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with("MemAvailable:")) return std::stoll(line.substr(13)) * 1024;
  return -1;
}

std::int64_t packed_bytes(const WeightSource& source, const std::string& dtype) {
  const double asked = dtype == "fp32" ? 4 : dtype == "int8" || dtype == "w8a8" ? 1.125 : dtype == "int4" ? 0.625 : 2;
  double bytes = 0;
  for (const auto& name : source.names()) {
    double numel = 1;
    for (const auto size : source.shape(name)) numel *= static_cast<double>(size);
    bytes += numel * asked;
  }
  return static_cast<std::int64_t>(bytes);
}

}  // namespace unshard::inference
