#pragma once
// Inference on LibTorch's devices.
#include "unshard/inference/engine.h"

namespace unshard::inference {

/// For Engine: computes every family with LibTorch's operators on `EngineOptions::device`, "cuda" or "cuda:N", in fp32, bf16 or fp16, with
/// a paged KV cache in the device's memory. Files that hold other types are expanded to bf16 where dtype is "auto".
///   inference::Engine engine(path, {.device = "cuda"}, inference::torch_models());
/// The factory throws std::invalid_argument for a dtype or kv_dtype that isn't built there (int8, int4, w8a8), and ModelError where the
/// device can't be used or its memory is too small.
ModelFactory torch_models();

}  // namespace unshard::inference
