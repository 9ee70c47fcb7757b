// The NEON arm (baseline of AArch64: no probe needed).
#if defined(__aarch64__)
#include <arm_neon.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../blocks.h"
#include "../integer.h"
#include "../kernels.h"
#include "../noise.h"
#define EDGEES_ARM_NEON
namespace edgees {
namespace {
#include "simd.h"

#include "blocks.inl"
#include "graph.inl"
#include "integer.inl"
#include "noise.inl"
#include "product.inl"
}  // namespace
const Kernels kernels_neon = {"neon", L,       philox,    add_signs, add_normals,     sign_dot,
                              decode, cells,   add_plane, tile,      quantize,        interleave,
                              codes,  signs,   panel,     peak,      add_panel_signs, unpanel,
                              column, to_half, rms_norm,  swiglu,    attend,          decay_add};
}  // namespace edgees
#endif
