#include "unshard/core/log.h"

#include <cstdio>
#include <cstdlib>
#include <string>

namespace unshard {

void log_info(std::string_view text) {
  static const bool quiet = [] {
    const char* value = std::getenv("UNSHARD_QUIET");
    return value != nullptr && *value != '\0' && std::string_view(value) != "0";
  }();
  if (!quiet) std::fprintf(stderr, "[unshard] %.*s\n", static_cast<int>(text.size()), text.data());
}

void log_warning(int rank, std::string_view text) {
  std::fprintf(stderr, "[unshard] rank %d: warning: %.*s\n", rank, static_cast<int>(text.size()), text.data());
}

}  // namespace unshard
