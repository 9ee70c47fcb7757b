// The table of kernels that every instruction-set arm fills. Scalar is the specification; whatever
// is marked "exact" must give the same bits on every arm, "bounded" may differ by summation order.
#pragma once
#include <cstdint>

namespace edgees {

struct Rows;  // integer.h
struct Codes16;
struct SignColumn;

constexpr int kAttendHeads = 16;  // at most, in one call
constexpr uint16_t kMinusInfinity = 0xFC00;

// One token's attention for the query heads that share a key-value head.
struct Attend {
  int heads;
  int64_t cells, dk, dv;
  const float* const* q;       // [heads] rows of dk
  const uint16_t *k, *v;       // binary16, one row per cell
  int64_t k_stride, v_stride;  // in halves
  const uint16_t* mask;        // [cells] binary16, -inf: not seen; null: all seen
  float scale, softcap;        // softcap 0: none
  const float *slope, *sink;   // [heads] or null
  float* scores;               // room for heads * room
  int64_t room;                // at least cells, rounded up to 16
  float* const* out;           // [heads] rows of dv
};

struct Kernels {
  const char* name;
  int lanes;  // of float vectors: the order of a float product's sum, and columns of a panel

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

  // Integers of a group of 32 lie in the arm's own order, weights and activations alike: number
  // order[i] at place i.
  const uint8_t* order;
  // exact. Activations as integers: x ~ scale * q for every kGroup of them, sum = scale * sum of q.
  // n is a multiple of kGroup.
  void (*quantize)(const float* x, int64_t n, int16_t* q, float* scale, float* sum);
  // `columns` (at most `lanes`) columns of q, ld apart, as one panel of lanes * n integers;
  // columns that are not there are zeros.
  void (*interleave)(const int16_t* q, int64_t ld, int columns, int64_t n, int16_t* panel);
  // exact. n weights of each row as integers, with their scales and offsets. False: the type is no
  // block type.
  bool (*codes)(const Rows& from, int rows, int64_t n, const Codes16& to);
  // exact. The +-1 of packed signs as integers, n a multiple of 32.
  void (*signs)(const uint32_t* words, int64_t n, int16_t* q);
  // A column as `sign_columns` wants it, in the arm's own form: 4 n numbers.
  void (*sign_table)(const int16_t* x, int64_t n, int32_t* table);
  // exact, and the same numbers as `panel` and `column` with +-1 of scale c: y[k][r] = c times row
  // rows[r] (at most 16) of a member's dense signs times column k (at most kSignColumns).
  void (*sign_columns)(uint64_t key, uint32_t tensor, const uint32_t* rows, int count, int64_t n,
                       const SignColumn* columns, int columns_count, float c);
  // exact. out[row * lanes + column] = (add: +=) rows times a panel; scale and sum are
  // [group][lanes]. A dot may be made in several calls, from its first group to its last.
  void (*panel)(const Codes16& w, bool add, int rows, int64_t n, const int16_t* x,
                const float* scale, const float* sum, float* out);
  // n steps of the panel kernel's own multiply-adds on registers alone; returns how many numbers
  // were multiplied. What a product can be measured against.
  int64_t (*peak)(int64_t n);
  // exact. out[r * lanes + c] += bit row + r of column c ? -by[c] : by[c]; words[word][lanes].
  void (*add_panel_signs)(float* out, int rows, int64_t row, const uint32_t* words,
                          const float* by);
  // exact. y[c][first + row] = from[row * lanes + c] for `count` columns.
  void (*unpanel)(const float* from, int rows, int count, float* const* y, int64_t first);
  // exact, and the same numbers: y[row] += rows times one column as `quantize` leaves it.
  void (*column)(const Codes16& w, int rows, int64_t n, const int16_t* x, const float* scale,
                 const float* sum, float* y);
  // exact. `codes` and `column` at once, for whole rows of a type with a table and no plane. False:
  // this arm does the two.
  bool (*table_column)(const Rows& from, int rows, int64_t n, const int16_t* x, const float* scale,
                       float* y);

  // exact. Rounded to nearest even.
  void (*to_half)(const float* x, int64_t n, uint16_t* y);
  // bounded. y = x / sqrt(mean(x^2) + eps)
  void (*rms_norm)(const float* x, int64_t n, float eps, float* y);
  // bounded. y = x / (1 + e^-x) * g
  void (*swiglu)(const float* x, const float* g, int64_t n, float* y);
  // bounded. out = softmax(scale q.k, capped, masked) v; cells at the end that nobody sees, and who
  // else is in the call, change nothing.
  void (*attend)(const Attend& a);

  // exact. delta[j] = keep*delta[j] + acc[j].
  void (*decay_add)(float* delta, const float* acc, int64_t n, float keep);
};

// An arm's table, from functions of these names in its own namespace.
#define EDGEES_KERNELS(name)                                                                       \
  {name,         L,      philox, add_signs,       add_normals, sign_dot, decode,       cells,      \
   add_plane,    tile,   order,  quantize,        interleave,  codes,    signs,        sign_table, \
   sign_columns, panel,  peak,   add_panel_signs, unpanel,     column,   table_column, to_half,    \
   rms_norm,     swiglu, attend, decay_add}

extern const Kernels kernels_scalar;
#if defined(__x86_64__) || defined(_M_X64)
extern const Kernels kernels_avx2;
extern const Kernels kernels_avxvnni;
extern const Kernels kernels_avx512;
extern const Kernels kernels_avx512vnni;
#elif defined(__aarch64__)
extern const Kernels kernels_neon;
#endif

// The arm in use: best that the CPU and the operating system support, or EDGEES_ISA.
const Kernels& kernels();

}  // namespace edgees
