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
#if defined(EDGEES_ARM_VNNI)
#define EDGEES_TARGET "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni"
#else
#define EDGEES_TARGET "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl"
#endif
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target(EDGEES_TARGET))), apply_to = function)
#else
#pragma GCC push_options
#if defined(EDGEES_ARM_VNNI)
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")
#else
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")
#endif
#endif
#define EDGEES_ARM_AVX512
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
const Kernels kernels_avx512vnni = EDGEES_KERNELS("avx512vnni");
#else
const Kernels kernels_avx512 = EDGEES_KERNELS("avx512");
#endif
}  // namespace edgees
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
