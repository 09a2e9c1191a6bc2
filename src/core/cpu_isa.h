#pragma once
// Which instruction set the flat passes of this process use. Chosen once, from the processor and UNSHARD_CPU_ISA (which only lowers it).
namespace unshard::kernels {

enum class Isa { portable = 0, avx2 = 1, avx512 = 2 };

/// \throws std::invalid_argument  UNSHARD_CPU_ISA holds something other than portable, avx2 or avx512.
Isa selected_isa();

/// The kernel table of the chosen instruction set. `avx2` and `avx512` are only called where they were built (x86-64).
template <class Table>
const Table& select_table(const Table& (*portable)(), const Table& (*avx2)(), const Table& (*avx512)()) {
  switch (selected_isa()) {
    case Isa::avx512:
      return avx512();
    case Isa::avx2:
      return avx2();
    case Isa::portable:
      break;
  }
  return portable();
}

}  // namespace unshard::kernels
