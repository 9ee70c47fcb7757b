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
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#if defined(__clang__)
#pragma clang attribute push(                                                    \
    __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")
#endif
#define EDGEES_ARM_AVX512
#include "../blocks.h"
#include "../integer.h"
namespace edgees {
namespace {
#include "simd.h"

#include "blocks.inl"
#include "graph.inl"
#include "integer.inl"
#include "noise.inl"
#include "product.inl"
}  // namespace
const Kernels kernels_avx512 = {
    "avx512",        L,       philox,   add_signs,  add_normals, sign_dot, decode, cells,
    add_plane,       tile,    quantize, interleave, codes,       signs,    panel,  peak,
    add_panel_signs, unpanel, column,   to_half,    rms_norm,    swiglu,   attend, decay_add};
}  // namespace edgees
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
