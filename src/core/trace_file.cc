#include "core/trace_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <utility>

#include "unshard/core/error.h"

namespace unshard {
namespace {

std::string file_name(const TimelineOptions& options) {
  return cat("timeline.rank", options.rank, options.name.empty() ? "" : ".", options.name, ".json");
}

bool is_name(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '-';
  });
}

void append_number(std::string& to, std::int64_t value) {
  std::array<char, 24> digits;
  to.append(digits.data(), std::to_chars(digits.data(), digits.data() + digits.size(), value).ptr);
}

std::string quoted(std::string_view text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\')
      (result += '\\') += c;
    else
      result += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return result += '"';
}

}  // namespace

TraceFile::TraceFile(const TimelineOptions& options, std::int32_t main_thread) : options_(options), main_thread_(main_thread) {
  origin_unix_s_ = std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  require(is_name(options.name), "[timeline] the name '", options.name,
          "' can't be part of a file's name; use letters, digits, _ and -, or none (EngineOptions::name)");
  const std::filesystem::path folder = options.directory;
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  path_ = (folder / file_name(options)).string();
  if (!error) {
    file_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (file_ < 0) error = std::error_code(errno, std::generic_category());
  }
  require(!error, "[timeline] rank ", options.rank, " can't write '", path_, "': ", error.message(),
          "; name a folder that can be made (unshard.timeline, --timeline or UNSHARD_TIMELINE)");
  pending_ = head();
}

TraceFile::~TraceFile() { close(); }

bool TraceFile::close() {
  const int file = std::exchange(file_, -1);
  return file < 0 || ::close(file) == 0;
}

std::string TraceFile::head() const {
  return cat(R"({"displayTimeUnit": "ms", "otherData": {"rank": )", options_.rank, ", \"world_size\": ", options_.world_size,
             ", \"host\": ", quoted(options_.host), ", \"run\": ", quoted(options_.run), ", \"engine\": ", quoted(options_.name),
             ", \"main_thread\": ", main_thread_, ", \"origin_ns\": ", origin_ns_,
             ", \"origin_unix_ms\": ", static_cast<std::int64_t>(origin_unix_s_ * 1e3), "},\n\"traceEvents\": [\n");
}

void TraceFile::set_clock(const ClockReading& reading) {
  begin_line();
  pending_ += cat(R"({"name":"clock","ph":"M","pid":)", options_.rank, ",\"tid\":", main_thread_, ",\"ts\":0,\"args\":{\"reading\":[",
                  reading.at_ns, ", ", reading.offset_ns, ", ", reading.uncertainty_ns, "]}}");
}

void TraceFile::begin_line() {
  if (std::exchange(has_lines_, true)) pending_ += ",\n";
}

void TraceFile::append_text(std::string_view text) { pending_ += quoted(text); }

void TraceFile::append_us(std::int64_t ns) {
  if (ns < 0) pending_ += '-', ns = -ns;
  append_number(pending_, ns / 1000);
  const auto rest = ns % 1000;
  pending_ += {'.', static_cast<char>('0' + rest / 100), static_cast<char>('0' + rest / 10 % 10), static_cast<char>('0' + rest % 10)};
}

void TraceFile::add(const TimelineEvent& event) {
  begin_line();
  const bool counter = event.end_ns == TimelineEvent::kCounter;
  pending_ += "{\"name\":";
  append_text(event.name);
  pending_ += counter ? ",\"ph\":\"C\",\"pid\":" : ",\"ph\":\"X\",\"pid\":";
  append_number(pending_, options_.rank);
  pending_ += ",\"tid\":";
  append_number(pending_, event.thread);
  pending_ += ",\"ts\":";
  append_us(event.begin_ns - origin_ns_);
  if (counter) {
    pending_ += ",\"args\":{\"bytes\":";
    append_number(pending_, event.number);
    pending_ += "}}";
    return;
  }
  threads_[event.thread] |= 1U << static_cast<unsigned>(event.lane);
  pending_ += ",\"dur\":";
  append_us(event.end_ns - event.begin_ns);
  pending_ += ",\"cat\":";
  append_text(lane_name(event.lane));
  pending_ += ",\"args\":{";
  if (event.number >= 0) {
    pending_ += event.lane == Lane::step ? "\"step\":" : "\"bytes\":";
    append_number(pending_, event.number);
  }
  if (event.detail[0] != '\0') {
    pending_ += event.number >= 0 ? ",\"of\":" : "\"of\":";
    append_text(event.detail);
  }
  pending_ += "}}";
}

std::string TraceFile::thread_name(std::int32_t thread, unsigned lanes) const {
  const auto has = [lanes](Lane lane) { return (lanes >> static_cast<unsigned>(lane) & 1U) != 0; };
  if (thread == main_thread_) return "main";
  if (has(Lane::prefetch)) return "prefetch";
  // First what only a thread that computes does: without overlap, or with full buckets, it adds gradients up too.
  if (has(Lane::compute) || has(Lane::gather) || has(Lane::reduce) || has(Lane::update)) return "autograd";
  if (has(Lane::bucket)) return "reduction";
  return "communication";
}

std::string TraceFile::closing(std::int64_t dropped, bool closed) const {
  std::string text;
  const char* separator = has_lines_ ? ",\n" : "";
  const auto named = [&](const char* what, std::int32_t thread, const std::string& name) {
    text += cat(std::exchange(separator, ",\n"), R"({"name":")", what, R"(","ph":"M","pid":)", options_.rank, ",\"tid\":", thread,
                ",\"ts\":0,\"args\":{\"name\":", quoted(name), "}}");
  };
  named("process_name", main_thread_, cat("rank ", options_.rank, " (", options_.host, ")"));
  for (const auto& [thread, lanes] : threads_) named("thread_name", thread, thread_name(thread, lanes));
  return text += cat("\n],\n\"recording\": {\"dropped\": ", dropped, ", \"closed\": ", closed ? "true" : "false", "}}\n");
}

// Everything from end_ on. One call for all of it, as a rule: who is killed is rarely killed inside.
bool TraceFile::replace_end(std::string_view text) {
  const auto size = static_cast<std::int64_t>(text.size());
  for (std::int64_t done = 0; done < size;) {
    const auto written = ::pwrite(file_, text.data() + done, static_cast<std::size_t>(size - done), end_ + done);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return false;
    done += written;
  }
  return ::ftruncate(file_, end_ + size) == 0;
}

bool TraceFile::write(std::int64_t dropped, bool closed) {
  auto end = closing(dropped, closed);
  if (replace_end(pending_ + end)) {
    end_ += static_cast<std::int64_t>(pending_.size());
    pending_.clear();
    closing_part_ = std::move(end);
    return true;
  }
  const int why = errno;
  // What was there before, in the room that it had.
  if (::ftruncate(file_, end_) == 0) static_cast<void>(replace_end(closing_part_));
  errno = why;
  return false;
}

}  // namespace unshard
