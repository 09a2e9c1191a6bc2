#pragma once
// How a rank that listens can be called: what it tells the others before anyone connects.
#include <cstdint>
#include <string>

namespace unshard::comm {

struct CallCard {
  std::string address;
  int port = 0;
  std::uint64_t cookie = 0;  ///< a caller must say it: nobody else is let in

  /// With a cookie of its own; the port is for who listens to fill in.
  static CallCard at(std::string address);
  std::string text() const;
  static CallCard parse(const std::string& text);
};

}  // namespace unshard::comm
