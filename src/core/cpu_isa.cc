#include "core/cpu_isa.h"

#include <cstdlib>
#include <string>

#include "unshard/core/error.h"
#include "unshard/core/flat_math.h"

namespace unshard::kernels {
namespace {

Isa supported_isa() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return avx512 ? Isa::avx512 : avx2 ? Isa::avx2 : Isa::portable;
#else
  return Isa::portable;
#endif
}

Isa choose_isa() {
  const Isa best = supported_isa();
  const char* wish = std::getenv("UNSHARD_CPU_ISA");
  if (wish == nullptr || *wish == '\0') return best;
  const std::string name = wish;
  require(name == "portable" || name == "avx2" || name == "avx512", "[core.isa] UNSHARD_CPU_ISA is \"", name,
          "\"; accepted: portable, avx2, avx512");
  const Isa wanted = name == "avx512" ? Isa::avx512 : name == "avx2" ? Isa::avx2 : Isa::portable;
  return wanted < best ? wanted : best;
}

}  // namespace

Isa selected_isa() {
  static const Isa isa = choose_isa();
  return isa;
}

const char* isa() {
  switch (selected_isa()) {
    case Isa::avx512:
      return "avx512";
    case Isa::avx2:
      return "avx2";
    case Isa::portable:
      break;
  }
  return "portable";
}

}  // namespace unshard::kernels
