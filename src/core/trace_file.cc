#include "core/trace_file.h"

#include <unistd.h>

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
  return cat("rank", options.rank, options.name.empty() ? "" : ".", options.name, ".json");
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
  const std::filesystem::path folder = options.directory;
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  path_ = (folder / file_name(options)).string();
  if (!error) {
    file_.reset(std::fopen(path_.c_str(), "w"));
    if (!file_) error = std::error_code(errno, std::generic_category());
  }
  require(!error, "[timeline] rank ", options.rank, " can't write '", path_, "': ", error.message(),
          "; name a folder that can be made (unshard.timeline, --timeline or UNSHARD_TIMELINE)");
  pending_ = "{\"displayTimeUnit\": \"ms\", \"traceEvents\": [\n";
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
  if (has(Lane::bucket)) return "reduction";
  if (has(Lane::compute) || has(Lane::gather)) return "autograd";
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
  text += cat("\n], \"otherData\": {\"rank\": ", options_.rank, ", \"world_size\": ", options_.world_size,
              ", \"host\": ", quoted(options_.host), ", \"run\": ", quoted(options_.run), ", \"engine\": ", quoted(options_.name),
              ", \"main_thread\": ", main_thread_, ", \"dropped\": ", dropped, ", \"closed\": ", closed ? "true" : "false",
              ", \"origin_ns\": ", origin_ns_, ", \"origin_unix_ms\": ", static_cast<std::int64_t>(origin_unix_s_ * 1e3), ", \"clock\": [");
  separator = "";
  for (const auto& reading : clock_)
    text += cat(std::exchange(separator, ", "), "[", reading.at_ns, ", ", reading.offset_ns, ", ", reading.uncertainty_ns, "]");
  return text += "]}}\n";
}

bool TraceFile::write(std::int64_t dropped, bool closed) {
  const std::string end = closing(dropped, closed);
  const bool done = std::fseek(file_.get(), end_, SEEK_SET) == 0 &&
                    std::fwrite(pending_.data(), 1, pending_.size(), file_.get()) == pending_.size() &&
                    std::fwrite(end.data(), 1, end.size(), file_.get()) == end.size() && std::fflush(file_.get()) == 0;
  if (!done) return false;
  end_ += static_cast<long>(pending_.size());
  pending_.clear();
  // The closing part may have become shorter (it hasn't, so far, but a file with two ends can't be read).
  return ftruncate(fileno(file_.get()), end_ + static_cast<long>(end.size())) == 0;
}

}  // namespace unshard
