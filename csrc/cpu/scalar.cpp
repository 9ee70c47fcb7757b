// The scalar arm: the specification of everything exact.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../blocks.h"
#include "../integer.h"
#include "../kernels.h"
#include "../noise.h"

namespace edgees {
namespace {
constexpr int L = 8;
constexpr const uint8_t* order = kNaturalOrder;

#include "scalar_blocks.inl"
#include "scalar_graph.inl"
#include "scalar_noise.inl"
// after what it uses
#include "scalar_integer.inl"
#include "scalar_product.inl"
}  // namespace
const Kernels kernels_scalar = EDGEES_KERNELS("scalar");
}  // namespace edgees
