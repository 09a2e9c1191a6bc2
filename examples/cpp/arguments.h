#pragma once
// The command line of train_gpt.
#include <cstdint>
#include <string>

namespace example {

struct Arguments {
  std::string config;      ///< DeepSpeed JSON; required
  std::string text;        ///< file or directory; empty: the standard library of a Python on this machine
  std::string save, load;  ///< directories of the whole training state
  std::int64_t steps = 100;
  std::int64_t layers = 6, heads = 6, width = 384, context = 256;
  std::int64_t seed = 1, report_every = 10, sample = 300;
  bool client_optimizer = false, help = false;

  static const char* usage();
  /// \throws std::invalid_argument naming what can't be used.
  static Arguments parse(int count, char** values);
};

}  // namespace example
