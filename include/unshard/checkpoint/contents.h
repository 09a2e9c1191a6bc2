#pragma once
// What a saved training state holds, apart from the values themselves.
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "unshard/optim/loss_scaler.h"
#include "unshard/optim/optimizer.h"

namespace unshard {

/// How far a training has come.
struct Counters {
  std::int64_t micro_steps = 0, global_steps = 0, global_samples = 0, skipped_steps = 0, applied_updates = 0;
};

namespace checkpoint {

/// Kinds of values beside the optimizer's states, which go by their names ("exp_avg").
inline constexpr const char* kParam = "param";  ///< in the compute dtype
inline constexpr const char* kFp32 = "fp32";    ///< master weights; where they exist, "param" isn't stored: it is their cast

struct SavedParameter {
  std::string name;
  std::vector<std::int64_t> sizes, strides;
  std::string dtype;               ///< "fp32", "bf16", ...: what it computed in
  int group = -1;                  ///< of the optimizer; -1: frozen
  std::int64_t steps = 0;          ///< updates it has had
  bool excluded = false;           ///< frozen, and left out on demand: it has no values here
  std::vector<std::string> kinds;  ///< what is stored of it

  std::int64_t numel() const;
  bool has(const std::string& kind) const;
  /// kFp32 or kParam, whichever is stored; empty: neither.
  std::string value_kind() const;
};

struct Contents {
  std::string origin;  ///< the file or folder, for messages
  std::string tag, unshard_version, torch_version;
  int world_size = 1, stage = 0;
  std::string optimizer_type;                 ///< empty: none
  std::vector<std::string> optimizer_states;  ///< names of its per-element states
  Counters counters;
  std::int64_t accumulation_steps = 0;  ///< of the run that saved; 0: unknown
  std::optional<LossScaler::State> loss_scaler;
  std::vector<GroupOptions> groups, initial_groups;  ///< hyperparameters now, and before any schedule; may be empty
  std::vector<SavedParameter> parameters;
  std::map<std::string, std::string> shared;  ///< other name of a tied parameter -> the one it is stored under

  /// By its own name or a tied one; null: not here.
  const SavedParameter* find(const std::string& name) const;
};

}  // namespace checkpoint
}  // namespace unshard
