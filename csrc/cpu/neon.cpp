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
#include "codes.inl"
#include "graph.inl"
#include "noise.inl"
// after what it uses
#include "integer.inl"
#include "product.inl"
}  // namespace
const Kernels kernels_neon = EDGEES_KERNELS("neon");
}  // namespace edgees
#endif
