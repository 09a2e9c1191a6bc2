// Trains a byte-level GPT on real text with Unshard, from the same JSON that DeepSpeed reads. Start it alone, or on several ranks:
//   torchrun --no-python --nproc-per-node 2 build/bin/train_gpt --config examples/configs/zero3.json
//   unshard run --nproc 2 build/bin/train_gpt ...,  mpirun -n 2 ...,  srun -n 2 ...
#include <torch/torch.h>
#include <unshard/unshard.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <string>

#include "arguments.h"
#include "gpt.h"
#include "text.h"

namespace example {
namespace {

using Clock = std::chrono::steady_clock;

unshard::NamedParameters named(const torch::nn::Module& module) {
  unshard::NamedParameters parameters;
  for (const auto& item : module.named_parameters()) parameters.emplace_back(item.key(), item.value());
  return parameters;
}

/// An optimizer of the program's own: AdamW that decays matrices only. It is built on whole parameters, as always with torch;
/// the engine gives it this rank's pieces.
void use_client_optimizer(const Gpt& model, const unshard::NamedParameters& parameters, unshard::EngineOptions& options) {
  std::vector<torch::Tensor> matrices, others;
  for (const auto& parameter : model->parameters()) (parameter.dim() >= 2 ? matrices : others).push_back(parameter);
  const auto with_decay = [](double decay) {
    return std::make_unique<torch::optim::AdamWOptions>(torch::optim::AdamWOptions(1e-3).betas({0.9, 0.95}).weight_decay(decay));
  };
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::move(matrices), with_decay(0.1));
  groups.emplace_back(std::move(others), with_decay(0));
  auto client = std::make_shared<torch::optim::AdamW>(std::move(groups), torch::optim::AdamWOptions(1e-3));
  options.groups = unshard::groups_of(*client, parameters);
  options.optimizer = unshard::wrap_torch_optimizer(client, parameters);
}

/// Memory of this process in MiB, shared pages counted in shares (PSS); 0 where the system doesn't say.
double process_mib() {
  std::ifstream file("/proc/self/smaps_rollup");
  for (std::string word; file >> word;)
    if (word == "Pss:") {
      double kib = 0;
      file >> kib;
      return kib / 1024;
    }
  return 0;
}

/// One value of every rank: their mean, and the largest.
double mean_over_ranks(unshard::Communicator& comm, double value) {
  auto sum = torch::full({1}, value, torch::kDouble);
  comm.all_reduce(sum, unshard::ReduceOp::sum, "report");
  return sum.item<double>() / comm.world_size();
}
double largest_of_ranks(unshard::Communicator& comm, double value) {
  auto largest = torch::full({1}, value, torch::kDouble);
  comm.all_reduce(largest, unshard::ReduceOp::max, "report");
  return largest.item<double>();
}

/// The progress lines. All ranks call it, rank 0 prints.
class Progress {
 public:
  Progress(unshard::Engine& engine, std::int64_t steps, std::int64_t tokens_per_step)
      : engine_(engine), steps_(steps), tokens_per_step_(tokens_per_step) {}

  void report(std::int64_t step, double loss) {
    const double seconds = std::chrono::duration<double>(Clock::now() - since_).count();
    const double rate = static_cast<double>(step - last_step_) / seconds;
    auto& comm = engine_.comm();
    loss = mean_over_ranks(comm, loss);
    const auto memory = engine_.memory();
    const double states = largest_of_ranks(comm, static_cast<double>(memory.parameters + memory.gradients + memory.optimizer) / (1 << 20));
    const double process = largest_of_ranks(comm, process_mib());
    if (comm.rank() == 0) {
      const auto left = static_cast<long>(std::lround(static_cast<double>(steps_ - step) / rate));
      std::printf("step %4lld/%lld  loss %.4f  %8.0f tokens/s  memory/rank %.0f MiB (model states %.0f MiB)  ETA %ld:%02ld\n",
                  static_cast<long long>(step), static_cast<long long>(steps_), loss, rate * static_cast<double>(tokens_per_step_), process,
                  states, left / 60, left % 60);
      std::fflush(stdout);
    }
    if (!std::isfinite(loss)) throw std::runtime_error("the loss is " + std::to_string(loss) + " at step " + std::to_string(step));
    if (last_step_ == 0) first_loss_ = loss;
    last_loss_ = loss;
    last_step_ = step;
    since_ = Clock::now();
  }
  double first_loss() const { return first_loss_; }
  double last_loss() const { return last_loss_; }

 private:
  unshard::Engine& engine_;
  std::int64_t steps_, tokens_per_step_, last_step_ = 0;
  double first_loss_ = 0, last_loss_ = 0;
  Clock::time_point since_ = Clock::now();
};

/// Bytes that terminals and logs take well: a young model writes broken UTF-8.
std::string printable(std::string text) {
  for (char& byte : text)
    if (const int code = static_cast<unsigned char>(byte); (code < ' ' && byte != '\n' && byte != '\t') || code > '~') byte = '?';
  return text;
}

void train(const Arguments& arguments, const unshard::Config& config, const std::shared_ptr<unshard::Communicator>& comm) {
  Windows windows(read_text(arguments.text.empty() ? default_text_path() : arguments.text), arguments.context,
                  static_cast<std::uint64_t>(arguments.seed * 1000 + comm->rank()));

  torch::manual_seed(arguments.seed);  // the same model on every rank
  Gpt model(GptOptions{.layers = arguments.layers, .heads = arguments.heads, .width = arguments.width, .context = arguments.context});
  const auto parameters = named(*model);
  unshard::EngineOptions options;
  if (arguments.client_optimizer) use_client_optimizer(model, parameters, options);
  unshard::Engine engine(parameters, config, comm, options);
  if (!arguments.load.empty()) engine.load(arguments.load);
  if (comm->rank() == 0) {
    std::int64_t numel = 0;
    for (const auto& [name, parameter] : parameters) numel += parameter.numel();
    std::printf("%.1fM parameters, ZeRO %d, %d rank%s\n", static_cast<double>(numel) / 1e6, config.zero.stage, comm->world_size(),
                comm->world_size() == 1 ? "" : "s");
  }

  Progress progress(engine, arguments.steps, config.batch.train_batch_size * arguments.context);
  for (std::int64_t step = 1; step <= arguments.steps; ++step) {
    double loss_sum = 0;
    for (std::int64_t micro = 0; micro < config.batch.accumulation_steps; ++micro) {
      const auto [tokens, targets] = windows.next(config.batch.micro_batch_size);
      const auto loss = model->loss(tokens, targets);
      engine.backward(loss);
      engine.step();
      loss_sum += loss.item<double>();
    }
    if (step == 1 || step % arguments.report_every == 0 || step == arguments.steps)
      progress.report(step, loss_sum / static_cast<double>(config.batch.accumulation_steps));
  }
  if (!arguments.save.empty()) engine.save(arguments.save);

  // Rank 0 alone reads the whole model here, partitioned or not; the others need not take part, only stay.
  if (comm->rank() == 0) {
    std::printf("loss %.4f -> %.4f\n", progress.first_loss(), progress.last_loss());
    if (arguments.sample > 0) std::printf("--- sample\n%s\n---\n", printable(model->generate("def ", arguments.sample)).c_str());
    std::fflush(stdout);
  }
  comm->barrier("end of training");
  engine.destroy();
}

}  // namespace
}  // namespace example

int main(int count, char** values) {
  int rank = 0;
  try {
    const auto arguments = example::Arguments::parse(count, values);
    if (arguments.help) {
      std::fputs(example::Arguments::usage(), stdout);
      return 0;
    }
    const auto [config, comm] = unshard::launch(arguments.config);
    rank = comm->rank();
    example::train(arguments, config, comm);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "train_gpt: rank %d: %s\n", rank, error.what());
    return 1;
  }
}
