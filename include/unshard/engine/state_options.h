#pragma once
// How the training state is saved and loaded.
#include <ATen/core/Tensor.h>

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace unshard {

struct SaveOptions {
  /// What the caller keeps beside the engine's state, as text and tensors; rank 0's is stored.
  std::string state_json = "{}";
  std::vector<std::pair<std::string, at::Tensor>> state_tensors;
  /// Leave out the values of parameters that require no gradient.
  bool exclude_frozen = false;
  /// Return when the values are copied to host memory; files are written while training goes on. Null: as the config says.
  std::optional<bool> background;
  /// The file `latest` beside the folder names it, written last.
  bool write_latest = false;
  /// It lies in this folder instead, which is above: a tag of several parts, as epoch1/step20.
  std::string latest_in;
  /// Remove all but the newest so many checkpoints beside it; 0: keep all. Null: as the config says.
  std::optional<int> keep;
  /// Further names of tied parameters: other name -> name.
  std::map<std::string, std::string> shared;
};

struct LoadOptions {
  bool load_optimizer = true;  ///< moments, step counts, hyperparameters, loss scale
  bool weights_only = false;   ///< nothing but weights: counters stay as well
  bool weights = true;         ///< false: the caller has put them in place; everything else is loaded
  bool strict = true;          ///< names that only one side has are an error
  bool verify = true;          ///< compare checksums before anything is changed
};

struct LoadReport {
  std::string state_json;                        ///< what save() was given; empty: there is none
  std::vector<std::string> missing, unexpected;  ///< names that only the model has, that only the saved state has
  bool has_optimizer = false;                    ///< the optimizer's state was loaded
};

}  // namespace unshard
