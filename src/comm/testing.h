#pragma once
// Ranks for tests: as threads over in_process_communicators, or as forked processes.
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <iostream>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "unshard/comm/communicator.h"

namespace unshard::testing {

/// What happened to the ranks of run_ranks; also its watchdog's state.
struct RankReports {
  std::mutex mutex;
  std::condition_variable changed;
  int running = 0;
  int first_failed = -1;
  std::string first_error;

  void fail(int rank, const std::string& error) {
    std::lock_guard<std::mutex> lock(mutex);
    if (first_failed >= 0) return;
    first_failed = rank;
    first_error = error;
  }
};

/// Run fn(rank, communicator) on a thread each and wait for all. If one throws, the others' waits end too, and the first failing rank's
/// error is thrown as std::runtime_error("rank 2: ..."). Ranks that still run after `limit_s` end the program: threads can't be stopped.
inline void run_on(std::vector<std::shared_ptr<Communicator>> communicators, const std::function<void(int, Communicator&)>& fn,
                   double limit_s = 60) {
  const int size = static_cast<int>(communicators.size());
  RankReports reports;
  reports.running = size;
  const auto run = [&](int rank) {
    auto communicator = std::move(communicators[static_cast<std::size_t>(rank)]);
    std::string error;
    try {
      fn(rank, *communicator);
    } catch (const std::exception& exception) {
      error = exception.what();
      if (error.empty()) error = "an exception without text";
    } catch (...) {
      error = "an exception that isn't a std::exception";
    }
    if (!error.empty()) {
      reports.fail(rank, error);
      if (communicator->local_host()) communicator->local_host()->fail("rank " + std::to_string(rank) + " threw: " + error);
    }
    communicator.reset();  // closes Gloo's connections, which releases peers that don't share memory
    std::lock_guard<std::mutex> lock(reports.mutex);
    --reports.running;
    reports.changed.notify_all();
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) threads.emplace_back(run, rank);
  {
    std::unique_lock<std::mutex> lock(reports.mutex);
    if (!reports.changed.wait_for(lock, std::chrono::duration<double>(limit_s), [&] { return reports.running == 0; })) {
      std::cerr << "run_ranks: " << reports.running << " of " << size << " ranks still run after " << limit_s
                << " s; first error: " << (reports.first_error.empty() ? "none" : reports.first_error) << std::endl;
      std::abort();
    }
  }
  for (auto& thread : threads) thread.join();
  if (reports.first_failed >= 0) throw std::runtime_error("rank " + std::to_string(reports.first_failed) + ": " + reports.first_error);
}

inline void run_ranks(int size, const CommOptions& options, const std::function<void(int, Communicator&)>& fn, double limit_s = 60) {
  run_on(in_process_communicators(size, options), fn, limit_s);
}

/// Ranks on several hosts, so many on each.
inline void run_hosts(const std::vector<int>& ranks_per_host, const CommOptions& options, const std::function<void(int, Communicator&)>& fn,
                      double limit_s = 60) {
  run_on(in_process_hosts(ranks_per_host, options), fn, limit_s);
}

inline void run_ranks(int size, const std::function<void(int, Communicator&)>& fn) { run_ranks(size, CommOptions{}, fn); }

/// Options for ranks that don't share memory.
inline CommOptions unshared(CommOptions options = {}) {
  options.share_memory = false;
  return options;
}

/// How a forked rank ended.
struct RankExit {
  int code = -1;  ///< what fn returned; 99: it threw; -1: a signal ended it
  int signal = 0;
  bool timed_out = false;
  double seconds = 0;  ///< since the start
};

/// Run fn(rank) in `size` forked processes; those that still run after `limit_s` are killed. An exception is printed and is exit code 99.
inline std::vector<RankExit> fork_ranks(int size, double limit_s, const std::function<int(int)>& fn) {
  using Clock = std::chrono::steady_clock;
  const auto started = Clock::now();
  const auto elapsed = [&] { return std::chrono::duration<double>(Clock::now() - started).count(); };
  std::fflush(nullptr);
  std::vector<pid_t> pids;
  for (int rank = 0; rank < size; ++rank) {
    const pid_t pid = ::fork();
    if (pid < 0) throw std::runtime_error("fork_ranks: fork failed");
    if (pid == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // a killed test leaves no ranks
      int code = 99;
      try {
        code = fn(rank);
      } catch (const std::exception& error) {
        std::cerr << "rank " << rank << ": " << error.what() << std::endl;
      }
      std::fflush(nullptr);
      ::_exit(code);
    }
    pids.push_back(pid);
  }
  std::vector<RankExit> exits(pids.size());
  for (std::size_t left = pids.size(); left > 0;) {
    for (std::size_t rank = 0; rank < pids.size(); ++rank) {
      int status = 0;
      if (pids[rank] == 0 || ::waitpid(pids[rank], &status, WNOHANG) != pids[rank]) continue;
      RankExit& exit = exits[rank];
      exit.seconds = elapsed();
      if (WIFEXITED(status)) exit.code = WEXITSTATUS(status);
      if (WIFSIGNALED(status)) exit.signal = WTERMSIG(status);
      pids[rank] = 0;
      --left;
    }
    if (left > 0 && elapsed() > limit_s) {
      for (std::size_t rank = 0; rank < pids.size(); ++rank) {
        if (pids[rank] == 0 || exits[rank].timed_out) continue;
        exits[rank].timed_out = true;
        ::kill(pids[rank], SIGKILL);
      }
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return exits;
}

/// A small all-gather of strings among forked ranks, for HostGroup::connect: made before the fork, used once by every rank.
class PipeExchange {
 public:
  explicit PipeExchange(int size) : size_(size), pipes_(static_cast<std::size_t>(size)) {
    for (auto& ends : pipes_)
      if (::pipe(ends.data()) != 0) throw std::runtime_error("pipe failed");
  }
  ~PipeExchange() {
    for (auto& ends : pipes_) ::close(ends[0]), ::close(ends[1]);
  }
  PipeExchange(const PipeExchange&) = delete;
  PipeExchange& operator=(const PipeExchange&) = delete;

  /// Each rank writes its text into every rank's pipe, in records of a fixed size, which pipes keep whole.
  HostGroup::Exchange for_rank(int rank) const {
    return [this, rank](const std::string& mine) {
      Record record{};
      record.rank = rank;
      if (mine.size() >= sizeof(record.text)) throw std::runtime_error("text too long for PipeExchange");
      mine.copy(record.text, mine.size());
      for (const auto& ends : pipes_)
        if (::write(ends[1], &record, sizeof(record)) != static_cast<ssize_t>(sizeof(record))) throw std::runtime_error("write failed");
      std::vector<std::string> all(static_cast<std::size_t>(size_));
      for (int i = 0; i < size_; ++i) {
        if (::read(pipes_[static_cast<std::size_t>(rank)][0], &record, sizeof(record)) != static_cast<ssize_t>(sizeof(record)))
          throw std::runtime_error("read failed");
        all[static_cast<std::size_t>(record.rank)] = record.text;
      }
      return all;
    };
  }

 private:
  struct Record {
    int rank = 0;
    char text[508] = {};
  };
  const int size_;
  std::vector<std::array<int, 2>> pipes_;
};

}  // namespace unshard::testing
