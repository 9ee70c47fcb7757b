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

#include "scalar_blocks.inl"
#include "scalar_graph.inl"
#include "scalar_integer.inl"
#include "scalar_noise.inl"
#include "scalar_product.inl"
}  // namespace
const Kernels kernels_scalar = {
    "scalar",        L,       philox,   add_signs,  add_normals, sign_dot, decode, cells,
    add_plane,       tile,    quantize, interleave, codes,       signs,    panel,  peak,
    add_panel_signs, unpanel, column,   to_half,    rms_norm,    swiglu,   attend, decay_add};
}  // namespace edgees
