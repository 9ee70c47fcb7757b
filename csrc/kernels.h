// The table of kernels that every instruction-set arm fills. Scalar is the specification; whatever
// is marked "exact" must give the same bits on every arm, "bounded" may differ by summation order.
#pragma once
#include <cstdint>

namespace edgees {

struct Kernels {
  const char* name;
  int lanes;  // float lanes over which a product's sum is spread: fixes its order

  // exact. Philox4x32-7 blocks first..first+n-1 of counter (block, row, tensor, stream): 4 words
  // each.
  void (*philox)(uint64_t key, uint32_t row, uint32_t tensor, uint32_t stream, uint32_t first,
                 int64_t n, uint32_t* out);
  // exact. row[j] += bit j of words ? -amp : +amp.
  void (*add_signs)(float* row, int64_t n, const uint32_t* words, float amp);
  // exact. row[j] += amp * float(quantile of half-word j of words); amp holds the table's scale.
  void (*add_normals)(float* row, int64_t n, const uint32_t* words, float amp);
  // bounded. sum_j (bit j ? -x[j] : x[j]), order fixed by lanes.
  float (*sign_dot)(const uint32_t* words, const float* x, int64_t n);

  // exact. One row of n weights of a GGUF block type to float32, as gguf's reference
  // dequantisation rounds it.
  void (*decode)(int type, const void* row, int64_t n, float* out);
  // exact. Width of the code steps (absolute scale) of each group of weights of that row; a float
  // type's is `float_cell`, per 32 weights.
  void (*cells)(int type, const void* row, int64_t n, float float_cell, float* out);
  // exact. w[j] += step[j / group] * (q[j] - 2^(bits-1)) for a packed residual plane row.
  void (*add_plane)(int bits, const uint8_t* plane, const float* step, int group, int64_t n,
                    float* w);

  // bounded. y[c][r] = dot(w + r*ldw, x[c], n) for `rows` rows and `cols` columns; each (r, c)
  // is summed in the same order whatever rows and cols are.
  void (*tile)(const float* w, int64_t ldw, int rows, int64_t n, const float* const* x, int cols,
               float* const* y);

  // One column: y[r] = what `decode`, `add_plane` and `tile` together would give, without writing
  // the weights down. Rows lie `stride` bytes apart, those of the plane `plane_stride`; a plane's
  // steps are cells * part. False: this type and width are not served here.
  bool (*dots)(int type, const uint8_t* rows, int64_t stride, int bits, const uint8_t* plane,
               int64_t plane_stride, float part, int count, int64_t n, const float* x, float* y);

  // exact. delta[j] = keep*delta[j] + acc[j].
  void (*decay_add)(float* delta, const float* acc, int64_t n, float keep);
};

extern const Kernels kernels_scalar;
#if defined(__x86_64__) || defined(_M_X64)
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
#elif defined(__aarch64__)
extern const Kernels kernels_neon;
#endif

// The arm in use: best that the CPU and the operating system support, or EDGEES_ISA.
const Kernels& kernels();

}  // namespace edgees
