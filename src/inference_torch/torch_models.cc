#include "unshard/inference/torch_models.h"

#include <ATen/Context.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "inference/open_model.h"
#include "inference_torch/torch_model.h"
#include "unshard/core/error.h"

namespace unshard::inference {
namespace {

/// \throws ModelError: it can't be used, and why.
at::Device device_of(const std::string& name) {
  if (name == "aten:cpu") return at::kCPU;
  const auto wrong = [&](const auto&... why) { throw ModelError(cat("[inference.engine] device \"", name, "\" can't be used: ", why...)); };
  if (!at::globalContext().hasCUDART()) wrong("this torch is built without CUDA; install a build of torch with it, or use device \"cpu\"");
  if (!at::hasCUDA()) wrong("torch finds no GPU on this machine; use device \"cpu\"");
  const c10::impl::VirtualGuardImpl guard(at::kCUDA);
  const at::Device device(name);
  if (device.has_index() && device.index() >= guard.deviceCount())
    wrong("there are ", static_cast<int>(guard.deviceCount()), " GPUs; cuda:0 is the first");
  return device.has_index() ? device : guard.getDevice();
}

at::ScalarType type_of(const std::string& name, const char* option, at::ScalarType otherwise, const std::string& device) {
  if (name == "auto") return otherwise;
  if (name == "fp32") return at::kFloat;
  if (name == "bf16") return at::kBFloat16;
  if (name == "fp16") return at::kHalf;
  throw std::invalid_argument(cat("[inference.engine] ", option, " is \"", name, "\", which is built for device \"cpu\" alone; on \"",
                                  device, "\" fp32, bf16", std::string(option) == "dtype" ? ", fp16" : "", " and auto are"));
}

std::unique_ptr<StepModel> make(OpenedModel model, const EngineOptions& options, std::int64_t context) {
  const auto dtype = type_of(options.dtype, "dtype", dtype_of_file(*model.weights, model.config), options.device);
  const auto kv_dtype = type_of(options.kv_dtype, "kv_dtype", dtype, options.device);
  const auto device = device_of(options.device);
  const auto path = model.weights->path();
  try {
    return std::make_unique<TorchModel>(*model.weights, std::move(model.config), dtype, kv_dtype, context, device);
  } catch (const c10::Error& error) {
    throw ModelError(cat(path, ": its weights can't be brought to ", device.str(), ": ", error.what_without_backtrace()));
  }
}

}  // namespace

ModelFactory torch_models() { return make; }

}  // namespace unshard::inference
