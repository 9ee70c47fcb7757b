// What device code is written in. The kernels compile with nvcc, with NVRTC (which has no headers
// of its own: edgees/cuda.py gives it a <stdint.h>), and as C++17 for the host under emulate.h.
#pragma once
#if defined(EDGEES_EMULATE)
#include "emulate.h"
#endif
#include "../noise.h"

#if defined(EDGEES_EMULATE)
#define EDGEES_SHARED(type, name) type& name = *static_cast<type*>(emulate::shared(sizeof(type)))
#define EDGEES_DEVICE inline
#define EDGEES_UNROLL
#define EDGEES_UNROLL_IF(condition, n)
#else
#define EDGEES_SHARED(type, name) __shared__ type name
#define EDGEES_DEVICE __device__ __forceinline__
#define EDGEES_UNROLL _Pragma("unroll")
#define EDGEES_UNROLL_IF(condition, n) EDGEES_PRAGMA(unroll((condition) ? n : 1))
#define EDGEES_PRAGMA(text) _Pragma(#text)
#endif

namespace edgees {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xFFFFFFFFu;

// Types of weights (csrc/blocks.h's numbers) and of x, y and other arguments.
constexpr int kF32 = 0, kF16 = 1, kBF16 = 30, kNF4Type = 100, kFP4Type = 101;
// Noise: EDGEES_NOISE_ of api.h.
constexpr int kSign = 0, kLowrank = 1, kNormal = 2;

using Word __attribute__((may_alias)) = uint32_t;  // two 16-bit numbers at once

// ---- numbers

EDGEES_DEVICE uint32_t bits_of(float f) { return __float_as_uint(f); }
EDGEES_DEVICE float with_bits(uint32_t u) { return __uint_as_float(u); }
// -f where the lowest bit of `minus` is set.
EDGEES_DEVICE float flip(float f, uint32_t minus) { return with_bits(bits_of(f) ^ minus << 31); }

#if !defined(EDGEES_EMULATE)
EDGEES_DEVICE float from_half(uint32_t h) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(static_cast<unsigned short>(h)));
  return f;
}
EDGEES_DEVICE uint32_t to_half(float f) {
  unsigned short h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
  return h;
}
#else
EDGEES_DEVICE float from_half(uint32_t h) { return half_to_float(static_cast<uint16_t>(h)); }
EDGEES_DEVICE uint32_t to_half(float f) { return half_of(f); }
#endif
EDGEES_DEVICE float from_brain(uint32_t b) { return with_bits(b << 16); }
EDGEES_DEVICE uint32_t to_brain(float f) {  // to nearest, ties to even; a NaN stays one
  const uint32_t u = bits_of(f);
  if ((u & 0x7FFFFFFFu) > 0x7F800000u) return u >> 16 | 0x40u;
  return (u + 0x7FFFu + (u >> 16 & 1)) >> 16;
}
// Two floats as one word of 16-bit numbers, the first one low.
template <bool Brain>
EDGEES_DEVICE uint32_t pack(float low, float high) {
#if !defined(EDGEES_EMULATE) && __CUDA_ARCH__ >= 800
  uint32_t both;
  if (Brain) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  }
  return both;
#else
  return Brain ? to_brain(low) | to_brain(high) << 16 : to_half(low) | to_half(high) << 16;
#endif
}

EDGEES_DEVICE float load(const void* p, int64_t i, int type) {
  if (type == kF32) return __ldg(static_cast<const float*>(p) + i);
  const uint32_t h = __ldg(static_cast<const uint16_t*>(p) + i);
  return type == kF16 ? from_half(h) : from_brain(h);
}
EDGEES_DEVICE void store(void* p, int64_t i, int type, float v) {
  if (type == kF32) {
    static_cast<float*>(p)[i] = v;
  } else {
    static_cast<uint16_t*>(p)[i] = static_cast<uint16_t>(type == kF16 ? to_half(v) : to_brain(v));
  }
}
// Eight numbers from i on; p is aligned to 16 bytes and i a multiple of 8.
EDGEES_DEVICE void load8(const void* p, int64_t i, int type, float* out) {
  if (type == kF32) {
    const float4* v = static_cast<const float4*>(p) + i / 4;
    const float4 a = __ldg(v), b = __ldg(v + 1);
    out[0] = a.x, out[1] = a.y, out[2] = a.z, out[3] = a.w;
    out[4] = b.x, out[5] = b.y, out[6] = b.z, out[7] = b.w;
    return;
  }
  const uint4 v = __ldg(static_cast<const uint4*>(p) + i / 8);
  const uint32_t w[4] = {v.x, v.y, v.z, v.w};
  EDGEES_UNROLL
  for (int k = 0; k < 4; ++k) {
    out[2 * k] = type == kF16 ? from_half(w[k] & 0xFFFFu) : from_brain(w[k] & 0xFFFFu);
    out[2 * k + 1] = type == kF16 ? from_half(w[k] >> 16) : with_bits(w[k] & 0xFFFF0000u);
  }
}

// ---- matrix units

// c[16][8] += a[16][16] b[8][16]^T, 16-bit numbers, float sums: mma.sync m16n8k16. Lane 4g + t
// holds a at (rows g, g+8; k 2t.., 2t+8..), b at (row g; the same k), c at (rows g, g+8; columns
// 2t, 2t+1).
template <bool Brain>
EDGEES_DEVICE void multiply(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#if defined(EDGEES_EMULATE)
  emulate::multiply<Brain>(c, a, b);
#elif __CUDA_ARCH__ >= 800
  if (Brain) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
#else  // sm_75 has halves only, and half as many of them: the two halves of k
  EDGEES_UNROLL
  for (int h = 0; h < 2; ++h) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[2 * h]), "r"(a[2 * h + 1]), "r"(b[h]));
  }
#endif
}

// Whether the matrix units of the architecture that is compiled for take bfloat16.
#if !defined(EDGEES_EMULATE) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr bool kBrainUnits = false;
#else
constexpr bool kBrainUnits = true;
#endif

// ---- noise

// The quantiles where threads can index them.
struct Quantiles {
  int32_t at[2049];
};
EDGEES_HD constexpr Quantiles quantiles() {
  Quantiles q{};
  for (int i = 0; i < 2049; ++i) q.at[i] = kNormalTable[i];
  return q;
}
static __device__ const Quantiles kQuantiles = quantiles();

EDGEES_DEVICE Words4 noise_block(uint64_t key, int64_t block, uint32_t row, uint32_t tensor,
                                 uint32_t stream) {
  return philox4x32<kNoiseRounds>(key, static_cast<uint32_t>(block), row, tensor, stream);
}
// One of four words, without an address: arrays indexed at run time would leave the registers.
EDGEES_DEVICE uint32_t pick(const Words4& v, int i) {
  const uint32_t low = i & 1 ? v.w[1] : v.w[0], high = i & 1 ? v.w[3] : v.w[2];
  return i & 2 ? high : low;
}
// 1 where element j of a sign stream's row is -1.
EDGEES_DEVICE uint32_t sign_at(uint64_t key, int64_t j, uint32_t row, uint32_t tensor,
                               uint32_t stream) {
  return pick(noise_block(key, j >> 7, row, tensor, stream), static_cast<int>(j >> 5 & 3)) >>
             (j & 31) &
         1;
}
EDGEES_DEVICE uint32_t packed_sign(const uint32_t* words, int64_t j) {
  return __ldg(words + (j >> 5)) >> (j & 31) & 1;
}
// Half-word h (0..7) of a block.
EDGEES_DEVICE uint32_t half_at(const Words4& v, int h) { return pick(v, h >> 1) >> 16 * (h & 1); }
EDGEES_DEVICE float normal_at(uint32_t half) {
  return static_cast<float>(normal_integer(kQuantiles.at, half & 0xFFFFu));
}

// ---- sums over a warp

// v[0..V-1] of all lanes summed, always by the same tree of lanes. Where V > 1 each step halves
// what a lane still holds; afterwards lane l has max(1, V / 32) sums in front, of values from index
// summed_at<V>(l) on.
template <int V>
EDGEES_DEVICE void warp_sums(float (&v)[V], int lane) {
  int left = V;
  EDGEES_UNROLL
  for (int by = kWarp / 2; by; by /= 2) {
    if (left > 1) {
      left /= 2;
      EDGEES_UNROLL
      for (int i = 0; i < V / 2; ++i) {
        if (i >= left) break;
        const bool upper = lane & by;
        const float sent = upper ? v[i] : v[i + left], kept = upper ? v[i + left] : v[i];
        v[i] = __fadd_rn(kept, __shfl_xor_sync(kAllLanes, sent, by));
      }
    } else {
      v[0] = __fadd_rn(v[0], __shfl_xor_sync(kAllLanes, v[0], by));
    }
  }
}
template <int V>
EDGEES_DEVICE int summed_at(int lane) {
  int at = 0, left = V;
  EDGEES_UNROLL
  for (int by = kWarp / 2; by; by /= 2) {
    if (left > 1) {
      left /= 2;
      at += lane & by ? left : 0;
    }
  }
  return at;
}

}  // namespace edgees
