#pragma once
// The checkpoints beside each other in one folder: which is the latest, which are old.
#include <string>

namespace unshard::checkpoint {

/// Where a folder that is being replaced is for a moment, on file systems that can't exchange two names.
std::string former_of(const std::string& directory);
/// `directory`, or where its former content is if a save was killed in that moment.
std::string present_of(const std::string& directory);

/// Remove all but the `keep` newest checkpoints of `save_dir`, and what interrupted saves left there. The one that `latest` names stays,
/// and folders that aren't checkpoints of ours are not touched. What can't be removed is left, with one warning.
void remove_old(const std::string& save_dir, int keep);

}  // namespace unshard::checkpoint
