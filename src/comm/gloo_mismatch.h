#pragma once
// Ranks in different collectives, as Gloo sees them: a message larger than what its receiver expects. Gloo throws then, on its own thread,
// where nobody can catch it, and the process would abort without saying who was in what.
#include <string>

namespace unshard::comm {

/// From here on such a thread comes to rest instead, and its words wait for gloo_mismatch(). Any other uncaught exception ends the process
/// as before. Once a process; later calls do nothing.
void catch_gloo_mismatches();

/// What Gloo said; empty while it hasn't. Groups of this process can't be used any more then, nor be destroyed.
std::string gloo_mismatch();

}  // namespace unshard::comm
