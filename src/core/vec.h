// Sixteen fp32 lanes for one instruction set, and the element types that are loaded into and stored from them.
//
// [Note: one source, three instruction sets] A kernel file is included by one source file per instruction set, which first defines
// UNSHARD_VEC_AVX512, UNSHARD_VEC_AVX2 or neither. Everything lands in the namespace UNSHARD_VEC_NS, and neither this header nor a kernel
// file includes or calls inline code of others: the linker keeps one copy of an inline function, and it must not be one with AVX-512 in it.
// Every operation below rounds once, in the same way in each set (IEEE add, multiply, divide, square root, fused multiply-add, nearest
// even), and there are 16 lanes everywhere; that is why results have the same bits whichever set runs.
#pragma once
#include <cstdint>

#if defined(UNSHARD_VEC_AVX512) || defined(UNSHARD_VEC_AVX2)
#include <immintrin.h>
#endif

#if defined(UNSHARD_VEC_AVX512)
#define UNSHARD_VEC_NS isa_avx512
#include "core/vec_avx512.h"
#elif defined(UNSHARD_VEC_AVX2)
#define UNSHARD_VEC_NS isa_avx2
#include "core/vec_avx2.h"
#else
#define UNSHARD_VEC_NS isa_portable
#include "core/vec_portable.h"
#endif

namespace unshard::UNSHARD_VEC_NS {

// An element type: T in memory; load16 / store16 move 16 of them; adopt16 is the edit check of the update kernels: lanes of `master` whose
// cast no longer equals the stored value take the stored value.
struct F32 {
  using T = float;
  static UNSHARD_INLINE Vec load16(const T* p) { return load_f32(p); }
  static UNSHARD_INLINE void store16(T* p, Vec x) { store_f32(p, x); }
  static UNSHARD_INLINE Vec adopt16(const T* p, Vec) { return load_f32(p); }
};
struct BF16 {
  using T = std::uint16_t;
  static UNSHARD_INLINE Vec load16(const T* p) { return from_bf16(load_u16(p)); }
  static UNSHARD_INLINE void store16(T* p, Vec x) { store_u16(p, to_bf16(x)); }
  static UNSHARD_INLINE Vec adopt16(const T* p, Vec master) {
    const Half16 stored = load_u16(p);
    return where_equal(stored, to_bf16(master), master, from_bf16(stored));
  }
};
struct F16 {
  using T = std::uint16_t;
  static UNSHARD_INLINE Vec load16(const T* p) { return from_f16(load_u16(p)); }
  static UNSHARD_INLINE void store16(T* p, Vec x) { store_u16(p, to_f16(x)); }
  static UNSHARD_INLINE Vec adopt16(const T* p, Vec master) {
    const Half16 stored = load_u16(p);
    return where_equal(stored, to_f16(master), master, from_f16(stored));
  }
};

/// 16 elements on the stack that stand in for the last, incomplete vector of an array: the same code runs on them.
template <class E>
struct Tail {
  typename E::T data[16] = {};
  UNSHARD_INLINE void get(const typename E::T* p, int count) {
    for (int i = 0; i < count; ++i) data[i] = p[i];
  }
  UNSHARD_INLINE void put(typename E::T* p, int count) const {
    for (int i = 0; i < count; ++i) p[i] = data[i];
  }
};

template <class E>
UNSHARD_INLINE Vec load_part(const typename E::T* p, int count) {
  Tail<E> tail;
  tail.get(p, count);
  return E::load16(tail.data);
}
template <class E>
UNSHARD_INLINE void store_part(typename E::T* p, Vec x, int count) {
  Tail<E> tail;
  E::store16(tail.data, x);
  tail.put(p, count);
}

}  // namespace unshard::UNSHARD_VEC_NS
