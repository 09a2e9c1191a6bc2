#include "unshard/comm/run_record.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "comm/first_line.h"
#include "comm/record_json.h"
#include "comm/record_signal.h"
#include "unshard/core/error.h"
#include "unshard/core/log.h"

namespace unshard {

namespace {

using namespace std::chrono_literals;
namespace fs = std::filesystem;

constexpr auto kLook = 250ms;  // for another rank's failure, and for handlers installed since
constexpr auto kTelling = 2s;  // a thread whose failure isn't the first gives the first this long to be written down
constexpr std::size_t kClosedKept = 8;

/// Changes whenever the file does; 0: there is none.
std::int64_t stamp_of(const fs::path& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) return 0;
  return static_cast<std::int64_t>(status.st_mtim.tv_sec) * 1'000'000'000 + status.st_mtim.tv_nsec;
}

/// All or nothing: readers may look at any time. False: it can't be written.
bool write_whole(const fs::path& path, const std::string& text) {
  const fs::path part = path.string() + cat(".", ::getpid(), ".part");
  const int fd = ::open(part.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd < 0) return false;
  std::size_t written = 0;
  while (written < text.size()) {
    const ssize_t some = ::write(fd, text.data() + written, text.size() - written);
    if (some < 0 && errno == EINTR) continue;
    if (some <= 0) break;
    written += static_cast<std::size_t>(some);
  }
  const bool closed = ::close(fd) == 0;
  if (written == text.size() && closed && ::rename(part.c_str(), path.c_str()) == 0) return true;
  ::unlink(part.c_str());
  return false;
}

/// A folder that only this user can write to; empty if somebody else got there first.
fs::path private_folder() {
  const char* set = std::getenv("TMPDIR");
  const fs::path folder = fs::path(set && *set ? set : "/tmp") / cat("unshard-", ::getuid());
  ::mkdir(folder.c_str(), 0700);
  struct stat status {};
  const bool ours = ::lstat(folder.c_str(), &status) == 0 && S_ISDIR(status.st_mode) && status.st_uid == ::getuid();
  return ours && (status.st_mode & 022) == 0 ? folder : fs::path();
}

std::string machine_name() {
  char name[256] = {};
  ::gethostname(name, sizeof(name) - 1);
  return name;
}

}  // namespace

std::string_view kind_of_failure(std::string_view error) {
  const auto says = [&](std::string_view words) { return error.find(words) != std::string_view::npos; };
  if (says("different calls") || says("ranks differ") || says("fewer times")) return "disagreement";
  if (says("no progress for") || says("didn't come within") || says("not every rank came") || says("has sent nothing for") ||
      says("Timed out waiting"))  // Gloo's words
    return "time-out";
  if (says("is gone") || says("left the group") || says("failed") || says("died") || says("timed out")) return "lost rank";
  return "error";
}

struct RunRecord::State {
  explicit State(RunRecordOptions given) : options(std::move(given)) {}
  std::string folder() const {
    const std::lock_guard lock(mutex);
    return options.directory;
  }
  fs::path file() const { return fs::path(folder()) / cat("rank", options.rank, ".json"); }
  fs::path failure_file() const { return fs::path(folder()) / "failure"; }
  void enter_directory();
  std::vector<GroupRecord> groups();
  std::string write(std::string_view reason, std::string_view text, const fs::path& to);
  void on_asked();
  void tell(std::string_view kind, std::string_view error);
  void look_for_failures();
  void watch();
  void tell_waits();
  void wait_for_others(double since, std::chrono::steady_clock::duration limit) const;
  bool in_owner() const { return ::getpid() == pid; }  // a forked child (a data loader's worker) isn't the rank

  const pid_t pid = ::getpid();
  const double started = comm::unix_seconds();
  mutable std::mutex mutex;  // options.directory, failure
  RunRecordOptions options;
  std::string failure, failure_kind;
  double failed_at = 0;
  bool telling = false;  ///< a thread is writing the failure down
  std::condition_variable told;
  std::int64_t seen_failure = 0;  ///< the failure file's stamp, when last looked at
  bool ended = false;
  std::atomic<bool> witnessed{false};  ///< the file shows this rank when it, or another one, failed: what follows from that adds nothing

  std::mutex groups_mutex;
  struct Source {
    std::function<GroupRecord()> record;
    std::function<void(std::string_view)> fail;
    HearWait hear_wait;
  };
  std::map<std::uint64_t, Source> sources;
  std::map<std::uint64_t, std::pair<std::string, std::string>> waits;  ///< group and place of the long waits of now, by source
  std::deque<GroupRecord> closed;
  std::uint64_t next_source = 0;
  std::atomic<int> roots{0};

  std::mutex write_mutex;
  std::optional<comm::RecordSignal> signal;
  std::atomic<bool> stop{false};
  std::thread thread;
};

// What an earlier run left there isn't this run's: it is kept under another name.
void RunRecord::State::enter_directory() {
  if (folder().empty()) return;
  std::error_code ignored;
  fs::create_directories(folder(), ignored);
  if (fs::exists(file(), ignored)) fs::rename(file(), fs::path(folder()) / cat("rank", options.rank, ".former.json"), ignored);
  const std::lock_guard lock(mutex);
  seen_failure = stamp_of(fs::path(options.directory) / "failure");
}

std::vector<GroupRecord> RunRecord::State::groups() {
  const std::lock_guard lock(groups_mutex);
  std::vector<GroupRecord> all(closed.begin(), closed.end());
  for (const auto& [id, source] : sources) all.push_back(source.record());
  return all;
}

std::string RunRecord::State::write(std::string_view reason, std::string_view text, const fs::path& to) {
  if (!in_owner() || to.empty()) return {};
  const std::string position = options.position ? options.position() : std::string();
  const std::lock_guard lock(write_mutex);
  comm::RecordFacts facts{options, pid, started, reason, text, {}, {}, 0, position};
  {
    const std::lock_guard failure_lock(mutex);
    facts.failure_kind = failure_kind;
    facts.failure = failure;
    facts.failed_at = failed_at;
  }
  return write_whole(to, comm::record_json(facts, groups())) ? to.string() : std::string();
}

void RunRecord::State::on_asked() {
  if (!folder().empty()) write("asked", {}, file());
  const auto answers = private_folder();  // where whoever knows only the process looks
  if (!answers.empty()) write("asked", {}, answers / cat("asked.", pid, ".json"));
}

void RunRecord::State::look_for_failures() {
  if (folder().empty() || witnessed) return;
  const std::int64_t stamp = stamp_of(failure_file());
  {
    const std::lock_guard lock(mutex);
    if (stamp == 0 || stamp == seen_failure) return;
    seen_failure = stamp;
    if (!failure.empty()) return;  // this rank has told its own
  }
  if (!write("another rank failed", {}, file()).empty()) witnessed = true;
}

void RunRecord::State::watch() {
  // `unshard doctor` signals only processes that have a thread of the first name.
  ::pthread_setname_np(::pthread_self(), signal && signal->listens() ? "unshard-record" : "unshard-files");
  while (!stop.load()) {
    pollfd event{signal ? signal->fd() : -1, POLLIN, 0};
    const int came = ::poll(&event, 1, static_cast<int>(kLook.count()));
    if (stop.load()) return;
    if (came > 0 && signal && signal->take() > 0) on_asked();
    if (signal) signal->adopt();
    look_for_failures();
  }
}

/// `since`: unix seconds from when their files are fresh. A file's time is that of the last clock tick.
void RunRecord::State::wait_for_others(double since, std::chrono::steady_clock::duration limit) const {
  const auto end = std::chrono::steady_clock::now() + limit;
  const auto fresh = static_cast<std::int64_t>((since - 0.02) * 1e9);
  const fs::path folder = this->folder();
  for (int rank = 0; rank < options.world_size; ++rank) {
    if (rank == options.rank) continue;
    while (stamp_of(folder / cat("rank", rank, ".json")) < fresh) {
      if (std::chrono::steady_clock::now() > end) return;
      std::this_thread::sleep_for(10ms);
    }
  }
}

RunRecord::RunRecord(std::unique_ptr<State> state) : state_(std::move(state)) {}

std::shared_ptr<RunRecord> RunRecord::start(RunRecordOptions options) {
  if (options.host.empty()) options.host = machine_name();
  std::shared_ptr<RunRecord> record(new RunRecord(std::make_unique<State>(std::move(options))));
  auto& state = *record->state_;
  state.enter_directory();
  if (state.options.on_signal) state.signal.emplace();
  state.thread = std::thread([&state] { state.watch(); });
  return record;
}

std::shared_ptr<RunRecord> RunRecord::from_environment(RunRecordOptions options) {
  const auto variable = [](const char* name) -> std::string {
    const char* value = std::getenv(name);
    return value ? value : "";
  };
  if (variable("UNSHARD_RECORD") == "off") return nullptr;
  if (const auto directory = variable("UNSHARD_RUN_DIR"); !directory.empty()) options.directory = directory;
  if (options.host.empty()) options.host = variable("UNSHARD_HOST");
  const std::string at_end = variable("UNSHARD_RECORD_AT_END");
  options.at_end = options.at_end || (!at_end.empty() && at_end != "0");
  return start(std::move(options));
}

RunRecord::~RunRecord() {
  if (!state_->in_owner()) {  // the thread is the parent's, and so are its locks
    state_->thread.detach();
    (void)state_.release();
    return;
  }
  end();
  state_->stop = true;
  state_->thread.join();
}

std::string RunRecord::write(std::string_view reason, std::string_view text) {
  auto& state = *state_;
  if (directory().empty()) return {};
  if (state.witnessed) return state.file().string();
  return state.write(reason, text, state.file());
}

void RunRecord::raise(std::string_view exception) {
  auto& state = *state_;
  if (!state.in_owner()) return;
  write("exception", exception);
  state.witnessed = true;  // the others fail because of it
  const std::lock_guard lock(state.groups_mutex);
  for (const auto& [id, group] : state.sources)
    if (group.fail) group.fail(exception);
}

void RunRecord::fail(std::string_view error) {
  auto& state = *state_;
  if (!state.in_owner() || state.witnessed) return;
  const std::string_view kind = kind_of_failure(error);
  {
    std::unique_lock lock(state.mutex);
    if (!state.failure.empty()) {  // what follows from the first one adds nothing, but may end the process: not before the first is told
      state.told.wait_for(lock, kTelling, [&] { return !state.telling; });
      return;
    }
    state.failure = error;
    state.failure_kind = kind;
    state.failed_at = comm::unix_seconds();
    state.telling = true;
  }
  const auto done = [](State* state) {
    const std::lock_guard lock(state->mutex);
    state->telling = false;
    state->told.notify_all();
  };
  const std::unique_ptr<State, decltype(done)> finally(&state, done);
  state.tell(kind, error);
}

void RunRecord::State::tell(std::string_view kind, std::string_view error) {
  if (folder().empty() || witnessed) return;
  const std::string path = write(kind, error, file());
  if (path.empty()) return;
  write_whole(failure_file(), cat("rank ", options.rank, ": ", error, "\n"));
  log_warning(options.rank, cat("its record is in ", path, "; `unshard doctor ", folder(), "` compares all ranks'"));
  if (kind == "time-out") wait_for_others(failed_at, 1500ms);
}

void RunRecord::end() {
  if (!state_->in_owner()) return;
  {
    const std::lock_guard lock(state_->mutex);
    if (std::exchange(state_->ended, true) || !state_->options.at_end || !state_->failure.empty()) return;
  }
  write("end of the run");
}

void RunRecord::set_directory(const std::string& directory) {
  {
    const std::lock_guard lock(state_->mutex);
    if (state_->options.directory == directory) return;
    state_->options.directory = directory;
  }
  state_->enter_directory();
}

std::string RunRecord::directory() const { return state_->folder(); }

std::uint64_t RunRecord::add(std::function<GroupRecord()> source, std::function<void(std::string_view)> fail, HearWait hear_wait) {
  const std::lock_guard lock(state_->groups_mutex);
  state_->sources[++state_->next_source] = {std::move(source), std::move(fail), std::move(hear_wait)};
  return state_->next_source;
}

void RunRecord::remove(std::uint64_t id) {
  if (!state_->in_owner()) return;
  const std::lock_guard lock(state_->groups_mutex);
  const auto found = state_->sources.find(id);
  if (found == state_->sources.end()) return;
  GroupRecord last = found->second.record();
  last.closed = true;
  state_->sources.erase(found);
  if (state_->waits.erase(id) > 0) state_->tell_waits();  // one that failed was left standing, for the others to read
  state_->closed.push_back(std::move(last));
  if (state_->closed.size() > kClosedKept) state_->closed.pop_front();
}

// Of several threads' waits the one of the newest group is told. Under groups_mutex.
void RunRecord::State::tell_waits() {
  const auto [group, place] = waits.empty() ? std::pair<std::string, std::string>() : waits.rbegin()->second;
  for (const auto& [id, source] : sources)
    if (source.hear_wait) source.hear_wait(group, place);
}

void RunRecord::waits(std::uint64_t id, std::string_view group, std::string_view place) {
  auto& state = *state_;
  if (!state.in_owner()) return;
  const std::lock_guard lock(state.groups_mutex);
  if (place.empty())
    state.waits.erase(id);
  else
    state.waits[id] = std::pair(std::string(group), std::string(place));
  state.tell_waits();
}

int RunRecord::next_root() { return state_->roots++; }

}  // namespace unshard
