// The record of this rank's run; see unshard/comm/run_record.h.
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <thread>

#include "bindings.h"
#include "unshard/comm/run_record.h"

namespace unshard::python {

namespace {

using namespace std::chrono_literals;

/// Python's threads as faulthandler's watchdog shows them: read without the interpreter's lock, which somebody holds on to.
std::string position_from_outside() {
  using Dump = const char* (*)(int fd, PyInterpreterState* interpreter, PyThreadState* current);
  const auto dump = reinterpret_cast<Dump>(::dlsym(RTLD_DEFAULT, "_Py_DumpTracebackThreads"));
  const int fd = dump ? ::memfd_create("unshard-traceback", MFD_CLOEXEC) : -1;
  if (fd < 0) return {};
  dump(fd, PyInterpreterState_Main(), nullptr);
  std::string text(64 << 10, '\0');
  const ssize_t length = ::pread(fd, text.data(), text.size(), 0);
  ::close(fd);
  text.resize(length > 0 ? static_cast<std::size_t>(length) : 0);
  const nlohmann::json json = {{"from", "outside, without the interpreter's lock"}, {"text", text}};
  return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

/// Asks Python, on a thread of its own, and doesn't wait for long: the thread that holds the lock may be the one that is stuck.
class Position {
 public:
  explicit Position(py::object function) : function_(hold(std::move(function))) {}

  std::string operator()() const {
    if (python_has_ended()) return {};
    std::optional<py::gil_scoped_release> nogil;
    if (PyGILState_Check()) nogil.emplace();
    const auto answer = std::make_shared<Answer>();
    std::thread([answer, function = function_] { ask(*answer, *function); }).detach();
    std::unique_lock lock(answer->mutex);
    if (answer->given.wait_for(lock, 500ms, [&] { return answer->done; })) return answer->text;
    return position_from_outside();
  }

 private:
  struct Answer {
    std::mutex mutex;
    std::condition_variable given;
    bool done = false;
    std::string text;
  };
  static void ask(Answer& answer, const py::object& function) {
    std::string text;
    if (!python_has_ended()) {
      py::gil_scoped_acquire gil;
      try {
        text = function().cast<std::string>();
      } catch (const std::exception&) {  // a record without a position is better than none
      }
    }
    const std::lock_guard lock(answer.mutex);
    answer.text = std::move(text);
    answer.done = true;
    answer.given.notify_all();
  }
  std::shared_ptr<py::object> function_;
};

py::object start_record(int rank, int world_size, const std::string& host, const std::string& directory,
                        const std::map<std::string, std::string>& versions, py::object position) {
  RunRecordOptions options;
  options.rank = rank;
  options.world_size = world_size;
  options.host = host;
  options.directory = directory;
  options.versions = versions;
  options.position = Position(std::move(position));
  auto record = RunRecord::from_environment(std::move(options));
  return record ? py::cast(RecordHandle(std::move(record))) : py::none();
}

}  // namespace

void bind_record(py::module_& module) {
  py::class_<RecordHandle>(module, "RunRecord", "What this rank tells about its run, as a file for `unshard doctor`.")
      .def(
          "write", [](const RecordHandle& r, const std::string& reason, const std::string& text) { return r->write(reason, text); },
          py::arg("reason"), py::arg("text") = "", NoGil(), "The path written, or '' without a folder.")
      .def(
          "raises", [](const RecordHandle& r, const std::string& exception) { r->raise(exception); }, py::arg("exception"), NoGil(),
          "An exception that nobody catches ends this rank: it is written, and the ranks that wait for this one hear of it.")
      .def(
          "end", [](const RecordHandle& r) { r->end(); }, NoGil())
      .def(
          "set_directory", [](const RecordHandle& r, const std::string& directory) { r->set_directory(directory); }, py::arg("directory"),
          NoGil())
      .def_property_readonly("directory", [](const RecordHandle& r) { return r->directory(); });
  module.def("start_record", &start_record, py::arg("rank"), py::arg("world_size"), py::arg("host"), py::arg("directory"),
             py::arg("versions"), py::arg("position"), "None where UNSHARD_RECORD=off. `position()` returns JSON text.");
}

}  // namespace unshard::python
