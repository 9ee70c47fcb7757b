// The whole C interface. Functions return 0 or an EDGEES_E_ code unless they say otherwise;
// pointers are to contiguous host memory; rows are canonical (Hugging Face) unless they say "file".
#pragma once
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#pragma GCC visibility push(default)

#define EDGEES_ABI 2
#define EDGEES_E_ARGUMENT (-1)  // a size, type or name makes no sense
#define EDGEES_E_TYPE (-2)      // no codec for this GGUF type
#define EDGEES_E_HOST (-3)      // llama.cpp is of another layout than we declare
#define EDGEES_E_COLUMNS (-4)   // a product had columns that belong to no known member

#define EDGEES_NOISE_SIGN 0
#define EDGEES_NOISE_LOWRANK 1
#define EDGEES_NOISE_NORMAL 2

// dispatch.cpp, parallel.cpp
int edgees_abi(void);
const char* edgees_isa(void);
const char* edgees_isas(void);  // usable arms, best first, separated by blanks
int edgees_set_isa(const char* name);
void edgees_set_threads(int n);  // 0: all processors of this process
int edgees_threads(void);

// noise.cpp: noise version 1 (design.md, section 2)
uint64_t edgees_key(uint64_t seed, uint32_t generation, uint32_t pair);
int edgees_philox(uint64_t key, uint32_t row, uint32_t tensor, uint32_t stream, uint32_t first,
                  int64_t blocks, uint32_t* out);
// out[rows][cols] = eps of canonical rows row0.. (vector != 0: a 1-D tensor, rows == 1).
int edgees_eps(int kind, int rank, int vector, uint64_t key, uint32_t tensor, int64_t row0,
               int64_t rows, int64_t cols, float* out);
int edgees_sign_vector(uint64_t key, uint32_t tensor, uint32_t stream, int64_t n, float* out);
int edgees_dither(uint64_t key, uint32_t tensor, int64_t row0, int64_t rows, int64_t cols,
                  float* out);

// update.cpp
int edgees_delta_apply(float* delta, int64_t rows, int64_t cols, int64_t row0, uint32_t tensor,
                       int kind, int rank, int vector, int pairs, const uint64_t* keys,
                       const float* coefs, float keep);
int edgees_factors_apply(float* a, int64_t rows, int64_t factors, uint32_t tensor, int rank,
                         int pairs, const uint64_t* keys, const uint32_t* slots, const float* coefs,
                         float keep);
// Residual plane of `rows` file rows starting at file row row0; delta holds the same rows, file
// order; canonical[i] is the canonical row of rows[i] (dither). cell_rho: cell of float types.
// counts[e] += elements with |delta| > cell*2^(e-1), e = 0..8 (cell == 0 does not count).
int edgees_plane_count(int type, const void* base, int64_t rows, int64_t cols, const float* delta,
                       float cell_rho, int64_t* counts);
int edgees_plane_encode(int type, const void* base, int64_t rows, int64_t cols, const float* delta,
                        const int32_t* canonical, uint64_t dither_key, uint32_t tensor, int bits,
                        int span, float cell_rho, uint8_t* plane);
// The same rows moved on the base's own lattice: out has the base's type and size.
int edgees_lattice_encode(int type, const void* base, int64_t rows, int64_t cols,
                          const float* delta, const int32_t* canonical, uint64_t dither_key,
                          uint32_t tensor, void* out);
int64_t edgees_plane_row_bytes(int bits, int64_t cols);

// blocks.cpp
int64_t edgees_row_bytes(int type, int64_t cols);  // < 0: EDGEES_E_
int edgees_decode(int type, const void* rows_data, int64_t rows, int64_t cols, float* out);
int edgees_cell_group(int type);  // weights that share a cell width; < 0: EDGEES_E_
int edgees_cells(int type, const void* rows_data, int64_t rows, int64_t cols, float cell_rho,
                 float* out);
// Effective weights: decode, then add the plane.
int edgees_effective(int type, const void* base, int64_t rows, int64_t cols, int bits,
                     const uint8_t* plane, int span, float cell_rho, float* out);

// product.cpp: y = x W^T of one tuned tensor for columns of mixed members
struct edgees_tensor {
  int type;              // GGUF type of base
  int heads;             // rows are stored permuted for rotary embeddings (0: they are not)
  int64_t rows, cols;    // of the matrix; a vector has rows == 1
  const void* base;      // file rows
  int64_t row_stride;    // bytes between file rows
  uint32_t id;           // canonical tensor id
  float rho;             // multiplies amplitudes: RMS of the base, or 1
  float cell;            // cell width where the base is of a float type
  int bits;              // residual plane: 0 none, 2, 4, 8
  int span;              // its span exponent
  const uint8_t* plane;  // file rows
  int factors;           // adapter: columns of a and of the pool; 0 none
  const float* a;        // [rows][factors], canonical rows
  const uint32_t* pool;  // [factors][(cols+127)/128*4] packed signs
  const float* delta;    // vectors: [cols]
  int lattice;           // base is a private copy on the lattice: nothing else to add
  // NF4, FP4 as bitsandbytes stores them: base is the packed codes of the matrix row by row, and
  // these are the absmax of every 64 of them. Null: base is blocks (blocks.h, Table4).
  const float* absmax;
};
struct edgees_member {
  uint64_t key;
  float amplitude;  // 0: the unperturbed centre
  uint32_t slot;
};
struct edgees_noise_kind {
  int kind, rank;
};
// y[c][row] for columns c = 0..n-1; member[c] indexes members; x[c], y[c] are the columns.
int edgees_product(const struct edgees_tensor* t, const struct edgees_noise_kind* noise,
                   const struct edgees_member* members, const int32_t* member, int64_t n,
                   const float* const* x, float* const* y);
// The same for matrices: column c is the row x + c * x_stride; members in arrays of their own.
struct edgees_members {
  int64_t count;
  const uint64_t* keys;
  const float* amplitudes;
  const uint32_t* slots;  // or null
};
int edgees_product_rows(const struct edgees_tensor* t, const struct edgees_noise_kind* noise,
                        const struct edgees_members* members, const int32_t* owner, int64_t n,
                        const float* x, int64_t x_stride, float* y, int64_t y_stride);
// All threads run n steps of the arm's multiply-adds on registers; how many numbers were
// multiplied.
int64_t edgees_peak(int64_t n);
// One row of the member's matrix (embedding lookup): out[cols]; row is a file row.
int edgees_row(const struct edgees_tensor* t, const struct edgees_noise_kind* noise,
               const struct edgees_member* member, int64_t row, float* out);
// The same for n rows of mixed members: out[n][cols].
int edgees_rows(const struct edgees_tensor* t, const struct edgees_noise_kind* noise,
                const struct edgees_members* members, const int32_t* owner, int64_t n,
                const int64_t* rows, float* out);
// The member's vector: base + delta + noise, [cols] (norm weights, biases).
int edgees_vector(const struct edgees_tensor* t, const struct edgees_noise_kind* noise,
                  const struct edgees_member* member, float* out);

// llama/accel.cpp: a backend inside stock llama.cpp
typedef struct edgees_session edgees_session;
int edgees_llama_install(void* library);  // handle of libllama; once per process
const char* edgees_llama_error(void);     // why install refused
edgees_session* edgees_session_new(int tensors, int kind, int rank);
void edgees_session_free(edgees_session* s);
void edgees_session_activate(edgees_session* s);  // null: llama.cpp runs as if we were not there
int edgees_session_tensor(edgees_session* s, int index, const char* source, int vector,
                          const struct edgees_tensor* t);
// Whose each token (and each token with logits) of the next llama_decode is.
int edgees_session_batch(edgees_session* s, int members, const struct edgees_member* member,
                         int64_t tokens, const int32_t* token, const int32_t* owner,
                         int64_t outputs, const int32_t* output_owner);
const char* edgees_session_error(const edgees_session* s);
int64_t edgees_session_seen(const edgees_session* s, int index);
const char* edgees_session_unclaimed(const edgees_session* s, int index);
// logits[i]: row i of `vocabulary` floats. out (may be null): natural log-probability of token[i];
// best (may be null): most likely token.
int edgees_logprob(const float* const* logits, int64_t rows, int64_t vocabulary,
                   const int32_t* token, double* out, int32_t* best);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
