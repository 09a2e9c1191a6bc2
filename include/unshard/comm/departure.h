#pragma once
// What a rank that lets go of a group tells those that still wait for it there.
#include <string_view>

namespace unshard {

class Communicator;

/// Why this rank is about to let go of `comm`, when that is no failure of the group's own: the text of an exception of the program's. The
/// others' waits then end with "rank 1 left the group after <why>". Not collective.
void set_departure(Communicator& comm, std::string_view why);

}  // namespace unshard
