#pragma once
// The text of a rank's record. `unshard doctor` reads it (python/unshard/doctor/load.py); format 1.
#include <string>
#include <string_view>
#include <vector>

#include "unshard/comm/run_record.h"

namespace unshard::comm {

struct RecordFacts {
  const RunRecordOptions& options;
  int pid = 0;
  double started = 0;  ///< of this record, unix seconds
  std::string_view reason, text;
  std::string failure_kind, failure;  ///< the first failure; empty: none
  double failed_at = 0;
  std::string position;  ///< RunRecordOptions::position's
};

/// Asks the kernel for links and addresses too.
std::string record_json(const RecordFacts& facts, const std::vector<GroupRecord>& groups);

double unix_seconds();

}  // namespace unshard::comm
