#pragma once
// What one rank has to write for one save, and who writes it: this thread, or one in the background.
#include <ATen/core/Tensor.h>

#include <string>
#include <thread>
#include <vector>

#include "checkpoint/commit.h"
#include "checkpoint/tensor_file.h"

namespace unshard {

struct PieceToSave {
  std::string key;
  checkpoint::Piece piece;
  at::Tensor value;  ///< flat
};

struct SaveJob {
  std::string directory;
  int rank = 0;
  std::vector<PieceToSave> pieces;
  // Rank 0:
  checkpoint::Manifest manifest;
  checkpoint::CommitOptions commit;
  std::string state_json;
  checkpoint::NamedTensors state_tensors;

  /// Private copies of all values on the CPU: training may go on.
  void copy_values();
  /// Write this rank's files and report them.
  void write();
  /// Rank 0: make the save visible when all ranks have reported.
  void finish();

 private:
  void write_state();
};

/// Writes and finishes a job on a thread of its own.
class BackgroundSave {
 public:
  explicit BackgroundSave(SaveJob job);
  ~BackgroundSave();
  BackgroundSave(const BackgroundSave&) = delete;
  BackgroundSave& operator=(const BackgroundSave&) = delete;
  /// Wait for it. \return what went wrong here; empty: nothing.
  std::string wait();

 private:
  void run();
  SaveJob job_;
  std::string error_;
  std::thread thread_;
};

}  // namespace unshard
