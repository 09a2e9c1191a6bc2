#include <ATen/core/Tensor.h>

#include <map>
#include <optional>

#include "bindings.h"
#include "checkpoint/checksum_reader.h"
#include "checkpoint/crc32c.h"
#include "checkpoint/keep.h"
#include "checkpoint/manifest.h"
#include "checkpoint/tensor_file.h"
#include "python_source.h"
#include "unshard/core/error.h"

namespace unshard::python {
namespace {

py::dict report_dict(const LoadReport& report) {
  py::dict result;
  result["missing"] = report.missing;
  result["unexpected"] = report.unexpected;
  result["has_optimizer"] = report.has_optimizer;
  return result;
}

std::string contents_text(const checkpoint::Contents& contents) {
  auto json = checkpoint::to_json(contents);
  for (std::size_t i = 0; i < contents.parameters.size(); ++i) json["parameters"][i]["kinds"] = contents.parameters[i].kinds;
  return json.dump();
}

LoadOptions load_options(bool load_optimizer, bool weights_only, bool strict, bool weights) {
  LoadOptions options;
  options.load_optimizer = load_optimizer;
  options.weights_only = weights_only;
  options.strict = strict;
  options.weights = weights;
  return options;
}

void save(const EngineHandle& engine, const std::string& directory, const std::string& state_json,
          std::map<std::string, at::Tensor> state_tensors, bool exclude_frozen, bool write_latest,
          std::map<std::string, std::string> shared, std::optional<bool> background, std::string latest_in) {
  SaveOptions options;
  options.state_json = state_json;
  options.state_tensors.assign(state_tensors.begin(), state_tensors.end());
  options.exclude_frozen = exclude_frozen;
  options.write_latest = write_latest;
  options.shared = std::move(shared);
  options.background = background;
  options.latest_in = std::move(latest_in);
  engine->save(directory, options);
}

// A Source that can't be made on one rank is that rank's error alone here: the caller agrees on it first.
py::dict load_source(const EngineHandle& engine, const py::object& object, bool load_optimizer, bool weights_only, bool strict,
                     bool weights) {
  PythonSource source(object);
  LoadReport report;
  {
    py::gil_scoped_release nogil;
    report = engine->load_from(source, load_options(load_optimizer, weights_only, strict, weights));
  }
  return report_dict(report);
}

}  // namespace

void bind_checkpoint(py::module_& module, py::class_<EngineHandle>& engine) {
  engine
      .def("save", &save, py::arg("directory"), py::arg("state_json") = "{}",
           py::arg("state_tensors") = std::map<std::string, at::Tensor>{}, py::arg("exclude_frozen") = false,
           py::arg("write_latest") = false, py::arg("shared") = std::map<std::string, std::string>{},
           py::arg("background") = std::optional<bool>{}, py::arg("latest_in") = "", NoGil())
      .def(
          "finish_save", [](const EngineHandle& e) { e->finish_save(); }, NoGil())
      .def(
          "wait_for_files", [](const EngineHandle& e) { e->wait_for_files(); }, NoGil())
      .def("is_saving", [](const EngineHandle& e) { return e->is_saving(); })
      .def(
          "load",
          [](const EngineHandle& e, const std::string& directory, bool optimizer, bool weights_only, bool strict, bool weights) {
            LoadReport report;
            {
              py::gil_scoped_release nogil;
              report = e->load(directory, load_options(optimizer, weights_only, strict, weights));
            }
            return report_dict(report);
          },
          py::arg("directory"), py::arg("load_optimizer") = true, py::arg("weights_only") = false, py::arg("strict") = true,
          py::arg("weights") = true)
      .def("load_source", &load_source, py::arg("source"), py::arg("load_optimizer") = true, py::arg("weights_only") = false,
           py::arg("strict") = true, py::arg("weights") = true, "The state that a Python object reads; see unshard.checkpoint.");
  py::class_<checkpoint::Source>(module, "CheckpointSource", "A saved state of our own format, to read from.")
      .def(
          "contents", [](const checkpoint::Source& s) { return contents_text(s.contents()); },
          "JSON text: manifest.json without \"files\", each parameter with its \"kinds\".")
      .def(
          "read",
          [](checkpoint::Source& s, const std::string& kind, const std::string& name, std::int64_t begin, std::int64_t end) {
            return s.read({kind, name, begin, end});
          },
          py::arg("kind"), py::arg("name"), py::arg("begin"), py::arg("end"), NoGil())
      .def(
          "verify", [](checkpoint::Source& s, int part, int parts, bool optimizer) { s.verify(part, parts, optimizer); }, py::arg("part"),
          py::arg("parts"), py::arg("with_optimizer"), NoGil(), "Compare the checksums of one of `parts` shares of the files.");
  module.def("open_checkpoint", &checkpoint::open, py::arg("directory"));
  module.def("latest_tag", &checkpoint::latest_tag, py::arg("save_dir"), "The tag that `latest` names; empty: there is none.");
  module.def("present_checkpoint", &checkpoint::present_of, py::arg("directory"),
             "The folder, or where its former content is if a save was killed while it was replaced.");
  module.def("verify_checkpoint", &checkpoint::verify, py::arg("directory"), "Compare all checksums of a folder.", NoGil());
  module.def(
      "crc32c",
      [](const at::Tensor& tensor) {
        require(tensor.is_cpu() && tensor.is_contiguous(), "[crc32c] wanted a contiguous tensor on the CPU");
        return checkpoint::crc32c(0, tensor.const_data_ptr(), tensor.nbytes());
      },
      py::arg("tensor"), "CRC-32C of its bytes.", NoGil());
  module.def(
      "checksum_file", [](const std::string& path) { return checkpoint::checksum_text(checkpoint::checksum_file(path)); }, py::arg("path"),
      "CRC-32C, as manifests have it.", NoGil());
  module.def(
      "read_tensor_file",
      [](const std::string& path) {
        const checkpoint::TensorFile file(path);
        std::map<std::string, at::Tensor> tensors;
        for (const auto& [name, entry] : file.entries()) tensors.emplace(name, file.read(name));
        return tensors;
      },
      py::arg("path"), "All of a safetensors file.", NoGil());
}

}  // namespace unshard::python
