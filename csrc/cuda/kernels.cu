// All kernels by their names, each with one structure as its argument, most threads of a block, and
// blocks that must fit a multiprocessor together; edgees/cuda.py has the same structures and says
// how they are launched.
#include "tile.h"
#include "update.h"

#if defined(EDGEES_EMULATE)
#define EDGEES_KERNEL(name, Argument, threads, blocks, ...)               \
  static void name(const void* argument) {                                \
    edgees::__VA_ARGS__(*static_cast<const edgees::Argument*>(argument)); \
  }                                                                       \
  static const emulate::Named name##_(#name, name, sizeof(edgees::Argument));
#else
#define EDGEES_KERNEL(name, Argument, threads, blocks, ...)     \
  extern "C" __global__ void __launch_bounds__(threads, blocks) \
      name(const __grid_constant__ edgees::Argument p) {        \
    edgees::__VA_ARGS__(p);                                     \
  }
#endif

// What to compile: cuda.py makes a module of each part that is needed.
#if !defined(EDGEES_PARTS)
#define EDGEES_PARTS 63
#endif

// Products of few columns: codes (4 bits) or floats, without or with dense noise, columns at a
// time.
#if EDGEES_PARTS & 1
EDGEES_KERNEL(gemv_codes_plain_1, Product, 256, 2, gemv<true, -1, 1>)
EDGEES_KERNEL(gemv_codes_plain_4, Product, 256, 2, gemv<true, -1, 4>)
EDGEES_KERNEL(gemv_codes_plain_16, Product, 256, 1, gemv<true, -1, 16>)
EDGEES_KERNEL(gemv_codes_sign_1, Product, 256, 2, gemv<true, edgees::kSign, 1>)
EDGEES_KERNEL(gemv_codes_sign_4, Product, 256, 1, gemv<true, edgees::kSign, 4>)
EDGEES_KERNEL(gemv_codes_sign_8, Product, 256, 1, gemv<true, edgees::kSign, 8>)
EDGEES_KERNEL(gemv_codes_normal_4, Product, 256, 1, gemv<true, edgees::kNormal, 4>)
#endif
#if EDGEES_PARTS & 2
EDGEES_KERNEL(gemv_floats_plain_1, Product, 256, 2, gemv<false, -1, 1>)
EDGEES_KERNEL(gemv_floats_plain_4, Product, 256, 2, gemv<false, -1, 4>)
EDGEES_KERNEL(gemv_floats_plain_16, Product, 256, 1, gemv<false, -1, 16>)
EDGEES_KERNEL(gemv_floats_sign_1, Product, 256, 2, gemv<false, edgees::kSign, 1>)
EDGEES_KERNEL(gemv_floats_sign_4, Product, 256, 1, gemv<false, edgees::kSign, 4>)
EDGEES_KERNEL(gemv_floats_sign_8, Product, 256, 1, gemv<false, edgees::kSign, 8>)
EDGEES_KERNEL(gemv_floats_normal_4, Product, 256, 1, gemv<false, edgees::kNormal, 4>)
#endif
#if EDGEES_PARTS & 4
EDGEES_KERNEL(gemv_any_16, Product, 128, 2, gemv_any<16>)
EDGEES_KERNEL(sign_dots, Product, 256, 2, dots)
EDGEES_KERNEL(row_lookup, Lookup, 256, 2, rows)
EDGEES_KERNEL(vector_of, Vector, 256, 2, vectors)
EDGEES_KERNEL(delta_apply, Delta, 256, 2, delta_apply)
EDGEES_KERNEL(factors_apply, Factors, 256, 2, factors_apply)
EDGEES_KERNEL(plane_encode, Rounding, 256, 2, plane_encode)
#endif
// Products of many: type of x, columns of a tile.
#if EDGEES_PARTS & 8
EDGEES_KERNEL(tile_bf16_64, Product, 256, 2, Tile<uint16_t, true, 64>::run)
EDGEES_KERNEL(tile_bf16_128, Product, 256, 1, Tile<uint16_t, true, 128>::run)
#endif
#if EDGEES_PARTS & 16
EDGEES_KERNEL(tile_f16_64, Product, 256, 2, Tile<uint16_t, false, 64>::run)
EDGEES_KERNEL(tile_f16_128, Product, 256, 1, Tile<uint16_t, false, 128>::run)
#endif
#if EDGEES_PARTS & 32
EDGEES_KERNEL(tile_f32_64, Product, 256, 1, Tile<float, false, 64>::run)
#endif

#if defined(EDGEES_EMULATE)
// 0, or 1 when there is no such kernel or its structure has another size.
extern "C" int edgees_emulate(const char* name, const unsigned* grid, const unsigned* block,
                              const void* argument, uint64_t size, uint64_t seed) {
  const emulate::Named* k = emulate::Named::find(name);
  if (!k || k->argument != size) return 1;
  emulate::launch(k->kernel, argument, {grid[0], grid[1], grid[2]}, {block[0], block[1], block[2]},
                  seed);
  return 0;
}
#endif
