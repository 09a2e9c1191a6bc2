#pragma once
// The engine's thread: takes requests, computes steps, gives outputs. What a step's tokens are: choose_tokens.h.
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <span>
#include <thread>
#include <unordered_map>
#include <vector>

#include "inference/choose_tokens.h"
#include "inference/outbox.h"
#include "inference/runner.h"
#include "inference/schedule/scheduler.h"
#include "inference/speculate/speculator.h"

namespace unshard::inference {

class ServingLoop {
 public:
  /// `speculator`: null, or who guesses tokens.
  ServingLoop(Runner& runner, const EngineOptions& options, Workers& workers, std::unique_ptr<Speculator> speculator);
  ~ServingLoop();  ///< ends after the step under way

  std::int64_t submit(std::vector<Token> prompt, RequestOptions options);
  void cancel(std::int64_t request);
  /// Run on this thread between two steps; returns when done. An exception comes out here.
  void run(const std::function<void()>& job);
  std::vector<Output> poll(double timeout_s) { return outbox_.take(timeout_s); }
  void end_polls() { outbox_.end(); }
  EngineStats stats() const;
  bool on_own_thread() const { return std::this_thread::get_id() == thread_.get_id(); }

 private:
  struct Arrival {
    std::int64_t request;
    std::vector<Token> prompt;
    RequestOptions options;
  };
  struct Sequence {
    std::int64_t request, index;
    Generation generation;
  };
  struct Job {
    const std::function<void()>* work;
    std::exception_ptr cause;
    bool done = false;
  };

  void work();
  bool take_news();  ///< false: time to end
  void admit(Arrival&& arrival);
  void drop(std::int64_t request);
  void guess();
  void compute(const Step& step);
  void choose(const Step& step);
  void give(SequenceId id, Draw& draw);
  void close(SequenceId id, Finish finish, const std::string& error);
  void forget(SequenceId id);
  void publish();

  Runner& runner_;
  const EngineOptions options_;
  Scheduler scheduler_;
  TokenChooser chooser_;
  std::unique_ptr<Speculator> speculator_;
  std::unordered_map<SequenceId, Sequence> sequences_;
  std::map<std::int64_t, std::vector<SequenceId>> requests_;
  SequenceId next_sequence_ = 1;
  std::vector<SequenceId> decoding_;  ///< sequences that got a token in the last step
  Batch batch_;
  std::vector<float> logits_;
  std::vector<Output> outputs_;
  EngineStats counts_;  ///< this thread's; published_ is its copy
  std::random_device entropy_;

  Outbox outbox_;
  mutable std::mutex mutex_;  ///< guards what follows
  std::condition_variable news_, job_done_;
  std::vector<Arrival> arrivals_;
  std::vector<std::int64_t> cancels_;
  std::vector<Job*> jobs_;
  EngineStats published_;
  std::int64_t next_request_ = 1, refused_ = 0;
  bool ending_ = false, failed_ = false;
  std::thread thread_;
};

}  // namespace unshard::inference
