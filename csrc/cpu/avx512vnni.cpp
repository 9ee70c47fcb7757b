// The AVX-512 arm of CPUs with VNNI. Everything after the pragma may use it; nothing here runs
// before the probe.
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
#pragma clang attribute push(                                                               \
    __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")
#endif
#define EDGEES_ARM_AVX512
#define EDGEES_ARM_VNNI
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
const Kernels kernels_avx512vnni = {
    "avx512vnni",    L,       philox,   add_signs,  add_normals, sign_dot, decode, cells,
    add_plane,       tile,    quantize, interleave, codes,       signs,    panel,  peak,
    add_panel_signs, unpanel, column,   to_half,    rms_norm,    swiglu,   attend, decay_add};
}  // namespace edgees
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
