#include "inference/serving_loop.h"

#include <algorithm>
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
          .look_back_tokens = runner.look_back(),
          .max_sequences = options.max_sequences,
          .share_prefixes = options.share_prefixes};
}

}  // namespace

ServingLoop::ServingLoop(Runner& runner, const EngineOptions& options, Workers& workers, std::unique_ptr<Speculator> speculator)
    : runner_(runner),
      options_(options),
      scheduler_(scheduler_options(runner, options)),
      chooser_(runner.info().vocab, runner.info().end_tokens, workers),
      speculator_(std::move(speculator)) {
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
  if (speculator_) speculator_->measure(runner_);
  while (take_news()) {
    const double start = seconds();
    if (speculator_) guess();
    const auto step = scheduler_.next();
    if (!step.chunks.empty()) {
      compute(step);
      choose(step);
      counts_.busy_s += seconds() - start;
      if (const auto* stream = runner_.stream()) {
        counts_.weight_bytes_read = stream->bytes_read();
        counts_.weight_wait_s = stream->wait_s();
      }
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
    const auto stream = seed + static_cast<std::uint64_t>(i) * 0x9e3779b97f4a7c15u;
    sequences_.emplace(id, Sequence{arrival.request, i, {options, filter, SamplerState(options->sampling, stream, arrival.prompt), {}}});
    if (speculator_) speculator_->add(id, arrival.prompt);
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

/// The next tokens of sequences that had one in the last step.
void ServingLoop::guess() {
  std::vector<Proposal> wanted;
  for (const auto id : decoding_)
    if (const auto found = sequences_.find(id); found != sequences_.end())
      wanted.push_back({id, scheduler_.most_guesses(id), 0, &found->second.generation.sampler, {}, 0});
  if (wanted.empty()) return;
  for (const auto& proposal : speculator_->propose(std::move(wanted), scheduler_.spare_tokens()))
    scheduler_.propose(proposal.sequence, proposal.tokens);
}

void ServingLoop::compute(const Step& step) {
  batch_.clear();
  for (const auto& chunk : step.chunks) {
    batch_.add(chunk.tokens, chunk.position, chunk.blocks.data());
    const auto rows = static_cast<std::int64_t>(batch_.tokens.size());
    if (!chunk.wants_token) continue;
    for (auto row = rows - 1 - chunk.drafts; row < rows; ++row) batch_.logit_rows.push_back(row);
    counts_.guessed += chunk.drafts;
  }
  const double start = seconds();
  runner_.step(step.copies, batch_, logits_);
  const auto prompt_tokens = step.tokens - static_cast<std::int64_t>(batch_.logit_rows.size());
  if (speculator_ && prompt_tokens == 0) speculator_->computed(step.tokens, seconds() - start);
  counts_.prompt_tokens += prompt_tokens;
}

void ServingLoop::choose(const Step& step) {
  std::vector<Draw> draws;
  decoding_.clear();
  for (const auto& chunk : step.chunks) {
    if (!chunk.wants_token) continue;
    draws.push_back({&sequences_.at(chunk.sequence).generation,
                     std::span(chunk.tokens).last(static_cast<std::size_t>(chunk.drafts)),
                     {},
                     Finish::none,
                     {}});
    decoding_.push_back(chunk.sequence);
  }
  chooser_.choose(draws, logits_);

  std::vector<Chosen> chosen;
  for (std::size_t i = 0; i < draws.size(); ++i) {
    if (!draws[i].error.empty()) {
      scheduler_.remove(decoding_[i]);
      continue;
    }
    chosen.push_back({decoding_[i], {}});
    for (const auto& choice : draws[i].choices) chosen.back().tokens.push_back(choice.token);
  }
  scheduler_.finish_step(chosen);
  for (std::size_t i = 0; i < draws.size(); ++i) give(decoding_[i], draws[i]);
}

/// A sequence's tokens of this step go out, and it ends where they say so.
void ServingLoop::give(SequenceId id, Draw& draw) {
  const auto& sequence = sequences_.at(id);
  if (speculator_) speculator_->chosen(id, draw.choices);
  counts_.generated_tokens += static_cast<std::int64_t>(draw.choices.size());
  counts_.accepted += std::max<std::int64_t>(static_cast<std::int64_t>(draw.choices.size()) - 1, 0);
  for (auto& choice : draw.choices) {
    const bool last = &choice == &draw.choices.back();
    outputs_.push_back({sequence.request, sequence.index, choice.token, choice.logprob, std::move(choice.likeliest),
                        last ? draw.finish : Finish::none, ""});
  }
  if (!draw.error.empty())
    close(id, Finish::error, draw.error);
  else if (draw.finish != Finish::none)
    forget(id);
}

void ServingLoop::close(SequenceId id, Finish finish, const std::string& error) {
  const auto& sequence = sequences_.at(id);
  outputs_.push_back({sequence.request, sequence.index, -1, 0, {}, finish, error});
  forget(id);
}

void ServingLoop::forget(SequenceId id) {
  scheduler_.remove(id);
  if (speculator_) speculator_->remove(id);
  const auto request = sequences_.at(id).request;
  sequences_.erase(id);
  auto& ids = requests_.at(request);
  std::erase(ids, id);
  if (!ids.empty()) return;
  requests_.erase(request);
  ++counts_.finished;
}

}  // namespace unshard::inference
