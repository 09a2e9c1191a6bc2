// What products need beyond core/vec.h: multiply-add, rounding to int8, bytes times bytes into int32 lanes. Same rules as there.
#pragma once
#include "core/vec.h"

#if defined(UNSHARD_VEC_AVX512)
#include "inference/kernels/lanes_avx512.h"
#elif defined(UNSHARD_VEC_AVX2)
#include "inference/kernels/lanes_avx2.h"
#else
#include "inference/kernels/lanes_portable.h"
#endif
