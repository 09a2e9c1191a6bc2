#include "comm/call_card.h"

#include <cstdlib>
#include <random>
#include <utility>

#include "unshard/core/error.h"

namespace unshard::comm {

CallCard CallCard::at(std::string address) {
  std::random_device random;
  return {std::move(address), 0, (static_cast<std::uint64_t>(random()) << 32 | random()) >> 1};
}

std::string CallCard::text() const { return cat(port, " ", cookie, " ", address); }

CallCard CallCard::parse(const std::string& text) {
  CallCard card;
  char* end = nullptr;
  card.port = static_cast<int>(std::strtol(text.c_str(), &end, 10));
  card.cookie = std::strtoull(end, &end, 10);
  card.address = *end == ' ' ? end + 1 : "";
  return card;
}

}  // namespace unshard::comm
