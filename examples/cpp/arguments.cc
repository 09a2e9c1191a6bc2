#include "arguments.h"

#include <cstdlib>
#include <map>
#include <stdexcept>
#include <string_view>

namespace example {
namespace {

std::int64_t to_number(std::string_view name, const std::string& text) {
  std::size_t used = 0;
  std::int64_t value = -1;
  try {
    value = std::stoll(text, &used);
  } catch (const std::exception&) {
    used = 0;
  }
  if (used != text.size() || value < 0) throw std::invalid_argument(std::string(name) + " wants a whole number, not '" + text + "'");
  return value;
}

}  // namespace

const char* Arguments::usage() {
  return "usage: train_gpt --config FILE [options]\n"
         "  --config FILE         DeepSpeed JSON: batch sizes, optimizer, precision, ZeRO stage\n"
         "  --text PATH           file or directory to train on (default: the sources of a Python's standard library)\n"
         "  --steps N             updates (100)\n"
         "  --layers N --heads N --width N --context N    the model (6 6 384 256: 10.8M parameters)\n"
         "  --seed N              (1)\n"
         "  --report-every N      steps between progress lines (10)\n"
         "  --sample N            bytes of text to write at the end (300)\n"
         "  --client-optimizer    torch::optim::AdamW of this program instead of the JSON's optimizer\n"
         "  --save DIR, --load DIR    the whole training state, at the end and at the start\n"
         "Ranks come from RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or from mpirun's or srun's variables; alone it's a world of "
         "one.\n";
}

Arguments Arguments::parse(int count, char** values) {
  Arguments arguments;
  const std::map<std::string_view, std::string*> texts = {
      {"--config", &arguments.config}, {"--text", &arguments.text}, {"--save", &arguments.save}, {"--load", &arguments.load}};
  const std::map<std::string_view, std::int64_t*> numbers = {
      {"--steps", &arguments.steps},     {"--layers", &arguments.layers},
      {"--heads", &arguments.heads},     {"--width", &arguments.width},
      {"--context", &arguments.context}, {"--seed", &arguments.seed},
      {"--sample", &arguments.sample},   {"--report-every", &arguments.report_every}};
  for (int i = 1; i < count; ++i) {
    std::string_view name = values[i];
    if (name == "--client-optimizer") {
      arguments.client_optimizer = true;
    } else if (name == "--help" || name == "-h") {
      arguments.help = true;
    } else if (name.starts_with("--local_rank") || name.starts_with("--local-rank")) {
      if (name.find('=') == std::string_view::npos) ++i;  // launchers add it; the environment says the same
    } else {
      const auto equals = name.find('=');
      const auto key = name.substr(0, equals);
      if (texts.count(key) == 0 && numbers.count(key) == 0)
        throw std::invalid_argument("unknown option " + std::string(name) + "\n" + usage());
      if (equals == std::string_view::npos && i + 1 == count) throw std::invalid_argument(std::string(name) + " wants a value");
      const std::string value(equals == std::string_view::npos ? std::string_view(values[++i]) : name.substr(equals + 1));
      if (const auto it = texts.find(key); it != texts.end()) *it->second = value;
      if (const auto it = numbers.find(key); it != numbers.end()) *it->second = to_number(key, value);
    }
  }
  if (arguments.help) return arguments;
  if (arguments.config.empty()) throw std::invalid_argument(std::string("--config FILE is missing\n") + usage());
  if (arguments.heads == 0 || arguments.width % arguments.heads != 0) throw std::invalid_argument("--width must be a multiple of --heads");
  if (arguments.report_every == 0 || arguments.context == 0) throw std::invalid_argument("--report-every and --context must be at least 1");
  return arguments;
}

}  // namespace example
