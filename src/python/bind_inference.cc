#include <pybind11/stl.h>

#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <thread>

#include "inference/model/shard.h"
#include "python_objects.h"
#include "unshard/core/error.h"
#include "unshard/inference/engine.h"

namespace unshard::python {
namespace {

using inference::EngineOptions;
using inference::RequestOptions;
using inference::Token;
using inference::TokenFilter;
using Inference = inference::Engine;

/// f(generated: list[int]) -> bytes, as many 32-bit little-endian words as `allowed` has.
class PythonFilter : public TokenFilter {
 public:
  explicit PythonFilter(py::object function) : function_(hold(std::move(function))) {}
  void restrict(std::span<const Token> generated, std::span<std::uint32_t> allowed) override {
    if (python_has_ended()) throw std::runtime_error("Python is ending");
    py::gil_scoped_acquire gil;
    const auto mask = (*function_)(std::vector<Token>(generated.begin(), generated.end())).cast<std::string>();
    if (mask.size() != allowed.size_bytes())
      throw std::runtime_error("a filter gave " + std::to_string(mask.size()) + " bytes; " + std::to_string(allowed.size_bytes()) +
                               " are wanted");
    std::memcpy(allowed.data(), mask.data(), mask.size());
  }

 private:
  std::shared_ptr<py::object> function_;
};

/// Takes the values of a dict by name, and says which name isn't one of them.
class Taker {
 public:
  Taker(const py::dict& values, const char* what) : values_(values), what_(what) {}
  template <class T>
  void take(const char* name, T& out) {
    names_.append(name);
    if (!values_.contains(name)) return;
    try {
      out = values_[name].cast<T>();
    } catch (const py::cast_error&) {
      throw std::invalid_argument(std::string("[inference] ") + what_ + " '" + name + "' is " +
                                  py::repr(values_[name]).cast<std::string>() + ", which isn't what belongs there");
    }
  }
  void finish() const {
    for (const auto& item : values_)
      if (!names_.contains(item.first))
        throw std::invalid_argument(std::string("[inference] there is no ") + what_ + " '" + py::str(item.first).cast<std::string>() + "'");
  }

 private:
  const py::dict& values_;
  const char* what_;
  py::list names_;
};

EngineOptions engine_options(const py::dict& values) {
  EngineOptions out;
  Taker taker(values, "engine option");
  taker.take("device", out.device);
  taker.take("dtype", out.dtype);
  taker.take("kv_dtype", out.kv_dtype);
  taker.take("threads", out.threads);
  taker.take("kv_cache_tokens", out.kv_cache_tokens);
  taker.take("kv_cache_bytes", out.kv_cache_bytes);
  taker.take("step_tokens", out.step_tokens);
  taker.take("max_sequences", out.max_sequences);
  taker.take("max_waiting", out.max_waiting);
  taker.take("max_context", out.max_context);
  taker.take("share_prefixes", out.share_prefixes);
  taker.take("speculate", out.speculate);
  taker.take("guesses", out.guesses);
  taker.take("always_guess", out.always_guess);
  taker.take("weight_memory_bytes", out.weight_memory_bytes);
  taker.take("weight_cache", out.weight_cache);
  taker.finish();
  return out;
}

RequestOptions request_options(const py::dict& values) {
  RequestOptions out;
  auto& sampling = out.sampling;
  std::map<Token, float> bias;
  std::vector<py::object> filters;
  Taker taker(values, "request option");
  taker.take("max_tokens", out.max_tokens);
  taker.take("min_tokens", out.min_tokens);
  taker.take("n", out.n);
  taker.take("stop_tokens", out.stop_tokens);
  taker.take("ignore_eos", out.ignore_eos);
  taker.take("priority", out.priority);
  taker.take("temperature", sampling.temperature);
  taker.take("top_p", sampling.top_p);
  taker.take("top_k", sampling.top_k);
  taker.take("min_p", sampling.min_p);
  taker.take("repetition_penalty", sampling.repetition_penalty);
  taker.take("presence_penalty", sampling.presence_penalty);
  taker.take("frequency_penalty", sampling.frequency_penalty);
  taker.take("seed", sampling.seed);
  taker.take("logit_bias", bias);
  taker.take("logprobs", sampling.logprobs);
  taker.take("filters", filters);
  taker.finish();
  sampling.logit_bias.assign(bias.begin(), bias.end());
  for (auto& filter : filters) out.filters.push_back(std::make_shared<PythonFilter>(std::move(filter)));
  return out;
}

py::list outputs_list(const std::vector<inference::Output>& outputs) {
  py::list list;
  for (const auto& output : outputs) {
    py::list likeliest;
    for (const auto& [token, logprob] : output.likeliest) likeliest.append(py::make_tuple(token, logprob));
    list.append(py::make_tuple(output.request, output.index, output.token, output.logprob, likeliest, inference::finish_name(output.finish),
                               output.error));
  }
  return list;
}

py::dict model_dict(const inference::ModelInfo& info) {
  using namespace py::literals;
  return py::dict("family"_a = info.family, "dtype"_a = info.dtype, "kv_dtype"_a = info.kv_dtype, "vocab"_a = info.vocab,
                  "layers"_a = info.layers, "context"_a = info.context, "parameters"_a = info.parameters,
                  "weight_bytes"_a = info.weight_bytes, "kv_bytes"_a = info.kv_bytes, "end_tokens"_a = info.end_tokens,
                  "weights_from_disk"_a = info.weights_from_disk, "unread"_a = info.unread);
}

py::dict stats_dict(const inference::EngineStats& stats) {
  using namespace py::literals;
  return py::dict("waiting"_a = stats.waiting, "running"_a = stats.running, "blocks"_a = stats.blocks, "blocks_used"_a = stats.blocks_used,
                  "block_tokens"_a = stats.block_tokens, "steps"_a = stats.steps, "prompt_tokens"_a = stats.prompt_tokens,
                  "generated_tokens"_a = stats.generated_tokens, "shared_tokens"_a = stats.shared_tokens,
                  "preemptions"_a = stats.preemptions, "finished"_a = stats.finished, "cancelled"_a = stats.cancelled,
                  "refused"_a = stats.refused, "guessed"_a = stats.guessed, "accepted"_a = stats.accepted, "busy_s"_a = stats.busy_s,
                  "weight_bytes_read"_a = stats.weight_bytes_read, "weight_wait_s"_a = stats.weight_wait_s);
}

/// Closed once, by any thread, while others may be in a call: each call holds the engine that it began with.
class PythonEngine {
 public:
  PythonEngine(const std::string& path, const EngineOptions& options, std::shared_ptr<inference::Peers> peers,
               const inference::ModelFactory& other_devices)
      : engine_(new Inference(path, options, std::move(peers), other_devices), &end) {}
  std::shared_ptr<Inference> get() const {
    if (auto held = std::atomic_load(&engine_)) return held;
    throw std::runtime_error("[inference] the engine is closed");
  }
  void close() {
    if (const auto held = std::atomic_load(&engine_); held && held->on_own_thread())
      throw std::runtime_error("[inference] a filter can't close the engine that waits for it");
    if (const auto held = std::atomic_exchange(&engine_, std::shared_ptr<Inference>())) held->end_polls();
  }

 private:
  /// Joins the engine's thread, which may wait for the GIL in a filter: never with the GIL.
  static void end(Inference* engine) {
    std::optional<py::gil_scoped_release> nogil;
    if (Py_IsInitialized() && PyGILState_Check()) nogil.emplace();
    if (engine->on_own_thread()) {  // a filter dropped the last reference: its thread can't wait for itself
      std::thread([engine] { delete engine; }).detach();
      return;
    }
    delete engine;
  }
  std::shared_ptr<Inference> engine_;
};

// As in bind_errors.cc: the classes live as long as the interpreter.
struct ErrorTypes {
  PyObject *model = nullptr, *overloaded = nullptr;
};
ErrorTypes& types() {
  static ErrorTypes instance;
  return instance;
}

/// Of a Communicator, which is a class of `_core`: only ranks that compute together need that module, and torch with it.
std::shared_ptr<inference::Peers> peers_of(const py::object& communicator) {
  if (communicator.is_none()) return nullptr;
  const py::object peers = communicator.attr("peers")();
  return peers.is_none() ? nullptr : *peers.cast<py::capsule>().get_pointer<std::shared_ptr<inference::Peers>>();
}

/// What computes on other devices, with LibTorch: of `_core`, which only they need.
inference::ModelFactory models_for(const std::string& device) {
  if (device == "cpu") return {};
  const py::object models = py::module_::import("unshard.core").attr("_core").attr("torch_models")();
  return *models.cast<py::capsule>().get_pointer<inference::ModelFactory>();
}

PyObject* new_error(py::module_& module, const char* name, const char* doc) {
  PyObject* type = PyErr_NewExceptionWithDoc((std::string("unshard.") + name).c_str(), doc, PyExc_RuntimeError, nullptr);
  if (type == nullptr) throw py::error_already_set();
  module.add_object(name, type);
  return type;
}

void translate(std::exception_ptr error) {
  try {
    std::rethrow_exception(error);
  } catch (const inference::ModelError& e) {
    // Names in files may be anything: bytes that aren't UTF-8 are shown, not refused.
    const std::string text = e.what();
    const py::object shown =
        py::reinterpret_steal<py::object>(PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "backslashreplace"));
    PyErr_SetObject(types().model, shown.ptr());
  } catch (const inference::Overloaded& e) {
    py::object value = py::handle(types().overloaded)(e.what());
    value.attr("retry_after_s") = e.retry_after_s;
    PyErr_SetObject(types().overloaded, value.ptr());
  } catch (const CommError& e) {  // of `_core`, without which there is no Communicator
    PyErr_SetString(py::module_::import("unshard._core").attr("CommError").ptr(), e.what());
  }
}

}  // namespace

void bind_inference(py::module_& module) {
  types().model = new_error(module, "ModelError", "A model can't be used; names file, tensor and reason.");
  types().overloaded = new_error(module, "Overloaded", "The queue is full; try again after `retry_after_s` seconds.");
  py::register_local_exception_translator(&translate);
  py::class_<PythonEngine, std::shared_ptr<PythonEngine>>(
      module, "InferenceEngine",
      "Serves one model: continuous batching over a paged KV cache, on a thread of its own. `unshard.LLM` is its Python form.")
      .def(py::init([](const std::string& path, const py::dict& options, const py::object& communicator) {
             const auto asked = engine_options(options);
             auto peers = peers_of(communicator);
             const auto other_devices = models_for(asked.device);
             py::gil_scoped_release nogil;
             return std::make_shared<PythonEngine>(path, asked, std::move(peers), other_devices);
           }),
           py::arg("path"), py::arg("options") = py::dict(), py::arg("communicator") = py::none())
      .def(
          "follow", [](const PythonEngine& self) { self.get()->follow(); }, NoGil(),
          "On ranks above 0: compute with rank 0 until it closes.")
      .def("model", [](const PythonEngine& self) { return model_dict(self.get()->model()); })
      .def("stats", [](const PythonEngine& self) { return stats_dict(self.get()->stats()); })
      .def(
          "submit",
          [](const PythonEngine& self, const std::vector<Token>& prompt, const py::dict& options) {
            const auto asked = request_options(options);
            const auto engine = self.get();
            py::gil_scoped_release nogil;
            return engine->submit(prompt, asked);
          },
          py::arg("prompt"), py::arg("options") = py::dict(), "Queue a request and return its number.")
      .def(
          "cancel", [](const PythonEngine& self, std::int64_t request) { self.get()->cancel(request); }, NoGil())
      .def(
          "poll",
          [](const PythonEngine& self, double timeout_s) {
            auto engine = self.get();
            std::vector<inference::Output> outputs;
            {
              py::gil_scoped_release nogil;
              outputs = engine->poll(timeout_s);
              engine.reset();
            }
            return outputs_list(outputs);
          },
          py::arg("timeout_s"),
          "(request, index, token, logprob, [(token, logprob)], finish, error) of what came since; waits for the first.")
      .def(
          "logits",
          [](const PythonEngine& self, const std::vector<Token>& tokens) {
            const auto engine = self.get();
            std::vector<float> values;
            {
              py::gil_scoped_release nogil;
              values = engine->logits(tokens);
            }
            return py::bytes(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
          },
          py::arg("tokens"), "Logits of every position, computed alone: float32 bytes of [tokens, vocab].")
      .def("close", &PythonEngine::close, NoGil(), "End what runs and give back all memory.");
}

}  // namespace unshard::python
