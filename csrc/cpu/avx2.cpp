// The AVX2 arm. Everything after the pragma may use AVX2; nothing here runs before the probe.
#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../kernels.h"
#include "../noise.h"
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
#define EDGEES_ARM_AVX2
#include "../blocks.h"
#include "../integer.h"
namespace edgees {
namespace {
#include "simd.h"

#include "blocks.inl"
#include "codes.inl"
#include "graph.inl"
#include "noise.inl"
// after what it uses
#include "integer.inl"
#include "product.inl"
}  // namespace
#if defined(EDGEES_ARM_VNNI)
const Kernels kernels_avxvnni = EDGEES_KERNELS("avxvnni");
#else
const Kernels kernels_avx2 = EDGEES_KERNELS("avx2");
#endif
}  // namespace edgees
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
