#pragma once
// Will a model fit? Asked before its weights are read.
#include <cstdint>
#include <string>

#include "inference/weights/weight_source.h"

namespace unshard::inference {

/// Memory that programs may still take, without swapping; -1: the system doesn't say.
std::int64_t available_bytes();
/// Roughly what the packed weights will take as `dtype` (of EngineOptions), from the file's header alone.
std::int64_t packed_bytes(const WeightSource& source, const std::string& dtype);

}  // namespace unshard::inference
