#pragma once
// How a save becomes visible: complete or absent.
//
// [Note: complete or absent] All ranks write to "<folder>.partial". Each leaves a report beside its file when that is on the disk. One rank
// waits for all reports, writes the manifest of them, syncs, and exchanges the partial folder with the final one in one step of the file
// system; `latest` is replaced after that. At every moment, whoever is killed, the tag that `latest` names is complete: the former save, or
// the new one. No collective is needed, so that it goes on in the background while ranks train.
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>

#include "checkpoint/manifest.h"

namespace unshard::checkpoint {

std::string partial_of(const std::string& directory);

/// An empty partial folder; what an interrupted save left is removed.
void begin_save(const std::string& directory);

/// A rank's file is complete, or it has failed (`error` not empty).
void report_file(const std::string& directory, int rank, const FileRecord& record, const std::string& error);

struct CommitOptions {
  bool write_latest = false;                ///< `latest` names this one
  std::string latest_in;                    ///< the folder that `latest` lies in, this one's or above; empty: the parent
  int keep = 0;                             ///< remove all but the newest so many checkpoints of the parent folder; 0: keep all
  std::chrono::duration<double> limit{60};  ///< wait so long for the ranks' reports
  std::function<std::string()> lost;        ///< why some rank will never report; empty text: all are well. May be null
};

/// Called by one rank. `manifest` has all but the ranks' files. \throws CheckpointError; the former save is as it was, and the partial
/// folder is gone.
void commit(const std::string& directory, Manifest manifest, const CommitOptions& options);

}  // namespace unshard::checkpoint
