#include "inference/serving_loop.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <optional>

#include "unshard/core/error.h"

namespace unshard::inference {
namespace {

constexpr auto kRest = std::chrono::seconds(2);  // between signs of life to other ranks while nothing is asked

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

SchedulerOptions scheduler_options(const Runner& runner, const EngineOptions& options) {
  return {.blocks = runner.kv_blocks(),
          .block_tokens = kBlockTokens,
          .step_tokens = options.step_tokens,
          .max_sequences = options.max_sequences,
          .share_prefixes = options.share_prefixes};
}

}  // namespace

ServingLoop::ServingLoop(Runner& runner, const EngineOptions& options, Workers& workers)
    : runner_(runner), options_(options), workers_(workers), scheduler_(scheduler_options(runner, options)) {
  for (std::int64_t i = 0; i < workers.count(); ++i) samplers_.push_back(std::make_unique<Sampler>(runner.info().vocab));
  end_tokens_.insert(runner.info().end_tokens.begin(), runner.info().end_tokens.end());
  publish();
  thread_ = std::thread([this] {
    try {
      work();
    } catch (...) {
      const auto cause = std::current_exception();
      runner_.fail();
      std::lock_guard lock(mutex_);
      failed_ = true;
      for (auto* job : std::exchange(jobs_, {})) job->cause = cause, job->done = true;
      job_done_.notify_all();
      outbox_.fail(cause);
    }
  });
}

ServingLoop::~ServingLoop() {
  {
    std::lock_guard lock(mutex_);
    ending_ = true;
  }
  news_.notify_all();
  thread_.join();
  if (failed_) return;
  try {
    runner_.end();
  } catch (...) {  // a rank is gone: nobody is left to tell
  }
}

std::int64_t ServingLoop::submit(std::vector<Token> prompt, RequestOptions options) {
  std::lock_guard lock(mutex_);
  if (failed_) throw std::runtime_error("[inference.submit] the engine's thread has ended with an error; poll() tells it");
  const auto waiting = published_.waiting + static_cast<std::int64_t>(arrivals_.size());
  if (waiting >= options_.max_waiting) {
    ++refused_;
    const double served = published_.finished > 0 ? published_.busy_s / static_cast<double>(published_.finished) : 1;
    throw Overloaded(cat(waiting, " requests wait already (max_waiting ", options_.max_waiting, ")"),
                     std::clamp(std::ceil(served * 4), 1.0, 60.0));
  }
  const auto request = next_request_++;
  arrivals_.push_back({request, std::move(prompt), std::move(options)});
  news_.notify_all();
  return request;
}

void ServingLoop::cancel(std::int64_t request) {
  std::lock_guard lock(mutex_);
  cancels_.push_back(request);
  news_.notify_all();
}

void ServingLoop::run(const std::function<void()>& work) {
  if (on_own_thread()) throw std::runtime_error("[inference] a filter can't ask the engine that waits for it");
  Job job{&work, nullptr};
  std::unique_lock lock(mutex_);
  if (failed_ || ending_) throw std::runtime_error("[inference] the engine's thread has ended");
  jobs_.push_back(&job);
  news_.notify_all();
  job_done_.wait(lock, [&] { return job.done; });
  if (job.cause) std::rethrow_exception(job.cause);
}

EngineStats ServingLoop::stats() const {
  std::lock_guard lock(mutex_);
  auto stats = published_;
  stats.waiting += static_cast<std::int64_t>(arrivals_.size());
  stats.refused = refused_;
  return stats;
}

void ServingLoop::publish() {
  const auto counts = scheduler_.counts();
  counts_.waiting = counts.waiting;
  counts_.running = counts.running;
  counts_.blocks_used = counts.blocks_used;
  counts_.preemptions = counts.preemptions;
  counts_.shared_tokens = counts.shared_tokens;
  counts_.blocks = runner_.kv_blocks();
  counts_.block_tokens = kBlockTokens;
  std::lock_guard lock(mutex_);
  published_ = counts_;
}

bool ServingLoop::take_news() {
  std::vector<Arrival> arrivals;
  std::vector<std::int64_t> cancels;
  std::vector<Job*> jobs;
  {
    std::unique_lock lock(mutex_);
    const auto news = [&] { return ending_ || !sequences_.empty() || !arrivals_.empty() || !cancels_.empty() || !jobs_.empty(); };
    while (!news_.wait_for(lock, kRest, news)) {
      lock.unlock();
      runner_.rest();
      lock.lock();
    }
    if (ending_) {
      for (auto* job : std::exchange(jobs_, {})) {
        job->cause = std::make_exception_ptr(std::runtime_error("[inference] the engine is being closed"));
        job->done = true;
      }
      job_done_.notify_all();
      return false;
    }
    arrivals.swap(arrivals_);
    cancels.swap(cancels_);
    published_.waiting += static_cast<std::int64_t>(arrivals.size());  // until the next publish()
  }
  for (auto& arrival : arrivals) admit(std::move(arrival));
  for (const auto request : cancels) drop(request);
  {
    std::lock_guard lock(mutex_);
    jobs.swap(jobs_);  // not before: the end of this thread tells those in jobs_
  }
  for (auto* job : jobs) {
    try {
      (*job->work)();
    } catch (...) {
      job->cause = std::current_exception();
    }
    std::lock_guard lock(mutex_);
    job->done = true;
    job_done_.notify_all();
  }
  return true;
}

void ServingLoop::work() {
  while (take_news()) {
    const auto step = scheduler_.next();
    if (!step.chunks.empty()) {
      const double start = seconds();
      compute(step);
      sample(step);
      counts_.busy_s += seconds() - start;
      ++counts_.steps;
    }
    publish();
    outbox_.put(std::move(outputs_));
    outputs_.clear();
  }
}

void ServingLoop::admit(Arrival&& arrival) {
  const auto options = std::make_shared<const RequestOptions>(std::move(arrival.options));
  const std::uint64_t seed = options->sampling.seed ? *options->sampling.seed : (std::uint64_t{entropy_()} << 32 | entropy_());
  auto& ids = requests_[arrival.request];
  for (std::int64_t i = 0; i < options->n; ++i) {
    const auto id = next_sequence_++;
    ids.push_back(id);
    const auto filter = options->filters.empty() ? nullptr : options->filters[static_cast<std::size_t>(i)];
    // One random stream a sequence, told apart by the index: the first is the same whatever n is.
    sequences_.emplace(id,
                       Sequence{arrival.request,
                                i,
                                options,
                                filter,
                                SamplerState(options->sampling, seed + static_cast<std::uint64_t>(i) * 0x9e3779b97f4a7c15u, arrival.prompt),
                                {}});
    if (i == 0)
      scheduler_.add({id, arrival.prompt, options->max_tokens, options->priority, 0});
    else
      scheduler_.add_fork(ids.front(), id);
  }
}

void ServingLoop::drop(std::int64_t request) {
  const auto found = requests_.find(request);
  if (found == requests_.end()) return;
  for (const auto id : std::vector<SequenceId>(found->second)) close(id, Finish::cancelled, "");
  ++counts_.cancelled;
  --counts_.finished;  // forget() took it for one that ended by itself
}

void ServingLoop::compute(const Step& step) {
  batch_.clear();
  for (const auto& chunk : step.chunks) {
    batch_.add(chunk.tokens, chunk.position, chunk.blocks.data());
    if (chunk.wants_token) batch_.logit_rows.push_back(static_cast<std::int64_t>(batch_.tokens.size()) - 1);
  }
  runner_.step(step.copies, batch_, logits_);
  counts_.prompt_tokens += step.tokens - static_cast<std::int64_t>(batch_.logit_rows.size());
}

/// Which tokens may come: the request's filter, and no end before min_tokens.
void ServingLoop::mask(const Sequence& sequence, std::vector<std::uint32_t>& allowed) const {
  const auto vocab = runner_.info().vocab;
  const bool early = static_cast<std::int64_t>(sequence.generated.size()) < sequence.options->min_tokens;
  if (!sequence.filter && !early) return;
  allowed.assign(static_cast<std::size_t>((vocab + 31) / 32), ~std::uint32_t{0});
  if (sequence.filter) sequence.filter->restrict(sequence.generated, allowed);
  if (!early) return;
  const auto forbid = [&](Token token) {
    if (token >= 0 && token < vocab) allowed[static_cast<std::size_t>(token) / 32] &= ~(std::uint32_t{1} << (token % 32));
  };
  for (const auto token : end_tokens_) forbid(token);
  for (const auto token : sequence.options->stop_tokens) forbid(token);
}

void ServingLoop::sample(const Step& step) {
  struct Draw {
    SequenceId id;
    Sequence* sequence;
    std::vector<std::uint32_t> allowed;
    Choice choice;
    std::string error;
  };
  std::vector<Draw> draws;
  for (const auto& chunk : step.chunks)
    if (chunk.wants_token) draws.push_back({chunk.sequence, &sequences_.at(chunk.sequence), {}, {}, {}});
  for (auto& draw : draws) {
    try {
      mask(*draw.sequence, draw.allowed);
    } catch (const std::exception& error) {
      draw.error = error.what();
    }
  }
  const auto vocab = static_cast<std::size_t>(runner_.info().vocab);
  std::atomic<std::size_t> next{0};
  const auto choose = [&](std::int64_t worker) {
    for (std::size_t i; (i = next.fetch_add(1)) < draws.size();) {
      auto& draw = draws[i];
      if (!draw.error.empty()) continue;
      try {
        draw.choice = samplers_[static_cast<std::size_t>(worker)]->choose(draw.sequence->sampler,
                                                                          std::span(logits_).subspan(i * vocab, vocab), draw.allowed);
      } catch (const std::exception& error) {
        draw.error = error.what();
      }
    }
  };
  if (draws.size() > 1)
    workers_.run(choose);
  else
    choose(0);

  std::vector<Chosen> chosen;
  for (const auto& draw : draws) {
    if (draw.error.empty())
      chosen.push_back({draw.id, {draw.choice.token}});
    else
      scheduler_.remove(draw.id);
  }
  scheduler_.finish_step(chosen);
  for (auto& draw : draws) {
    if (!draw.error.empty())
      close(draw.id, Finish::error, draw.error);
    else if (settle(*draw.sequence, std::move(draw.choice)))
      forget(draw.id);
  }
}

bool ServingLoop::settle(Sequence& sequence, Choice&& choice) {
  const auto& options = *sequence.options;
  sequence.generated.push_back(choice.token);
  ++counts_.generated_tokens;
  const bool stopped = std::find(options.stop_tokens.begin(), options.stop_tokens.end(), choice.token) != options.stop_tokens.end() ||
                       (!options.ignore_eos && end_tokens_.contains(choice.token));
  const bool full = static_cast<std::int64_t>(sequence.generated.size()) >= options.max_tokens;
  const auto finish = stopped ? Finish::stop : full ? Finish::length : Finish::none;
  outputs_.push_back({sequence.request, sequence.index, choice.token, choice.logprob, std::move(choice.likeliest), finish, ""});
  return finish != Finish::none;
}

void ServingLoop::close(SequenceId id, Finish finish, const std::string& error) {
  const auto& sequence = sequences_.at(id);
  outputs_.push_back({sequence.request, sequence.index, -1, 0, {}, finish, error});
  forget(id);
}

void ServingLoop::forget(SequenceId id) {
  scheduler_.remove(id);
  const auto request = sequences_.at(id).request;
  sequences_.erase(id);
  auto& ids = requests_.at(request);
  std::erase(ids, id);
  if (!ids.empty()) return;
  requests_.erase(request);
  ++counts_.finished;
}

}  // namespace unshard::inference
