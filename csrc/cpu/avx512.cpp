// The AVX512 arm. Everything after the pragma may use AVX512; nothing here runs before the probe.
#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../kernels.h"
#include "../noise.h"
// GCC 12 warns of its own intrinsics' undefined operands.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")
#define EDGEES_ARM_AVX512
#include "../blocks.h"
namespace edgees {
namespace {
#include "simd.h"

#include "blocks.inl"
#include "noise.inl"
#include "product.inl"
}  // namespace
const Kernels kernels_avx512 = {"avx512", L,     philox,    add_signs, add_normals, sign_dot,
                                decode,   cells, add_plane, tile,      decay_add};
}  // namespace edgees
#pragma GCC pop_options
#endif
