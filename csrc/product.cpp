// Products of one tuned tensor with the columns of many members in one pass over its weights.
//
//   y = decode(base + plane) x  +  A (B^T x)  +  c eps x        (plane: refined, A B^T: adapter)
//
// The first two terms are the same for all members. Lowrank noise needs only sign dots of the
// columns (c a_k (b_k . x)), in the adapter view those that B^T x holds anyway; the dense kinds
// make the rows of eps anew for each member. Every output is one sum in one fixed order, whatever
// else is in the batch and however many threads work.
#include <algorithm>
#include <cmath>
#include <vector>

#include "api.h"
#include "blocks.h"
#include "kernels.h"
#include "noise.h"
#include "parallel.h"

namespace edgees {
namespace {

constexpr int64_t kFew = 4;            // columns up to which side work is not worth waking threads
constexpr int64_t kCache = 192 << 10;  // bytes of decoded rows held while columns pass by

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

template <class Body>
void each(int64_t n, bool threads, Body body) {
  if (threads) {
    parallel_for(n, [&](int64_t i, int) { body(i); });
  } else {
    for (int64_t i = 0; i < n; ++i) body(i);
  }
}

bool valid(const edgees_tensor& t, const edgees_noise_kind& noise) {
  if (t.rows <= 0 || t.cols <= 0 || !t.base || row_bytes(t.type, t.cols) < 0) return false;
  if (t.bits != 0 && t.bits != 2 && t.bits != 4 && t.bits != 8) return false;
  if (t.bits && !t.plane) return false;
  if (t.factors && (!t.a || !t.pool || noise.kind != EDGEES_NOISE_LOWRANK)) return false;
  return noise.rank >= 1 && noise.rank <= kMaxRank;
}

// The columns of one member: positions first..first+count-1 of the sorted order.
struct Owner {
  const edgees_member* member;
  float c;  // amplitude * rho
  int64_t first, count;
};

void decode_rows(const edgees_tensor& t, int64_t row, int64_t n, float* scratch, float* out) {
  const Plane plane{t.bits, t.span, t.cell};
  const int64_t stride = plane_bytes(t.bits, t.cols);
  for (int64_t r = row; r < row + n; ++r) {
    decode_row(t.type, static_cast<const uint8_t*>(t.base) + r * t.row_stride, t.cols, plane,
               t.plane + r * stride, scratch, out + (r - row) * t.cols);
  }
}

// Left factor k of a member as packed signs in file order.
void left_words(const edgees_tensor& t, uint64_t key, int k, uint32_t* words) {
  const uint32_t stream = kStreamLeft + static_cast<uint32_t>(k);
  if (!t.heads) {
    sign_words(key, 0, t.id, stream, t.rows, words);
    return;
  }
  static thread_local std::vector<uint32_t> canonical;
  canonical.resize(static_cast<size_t>(sign_word_count(t.rows)));
  sign_words(key, 0, t.id, stream, t.rows, canonical.data());
  std::fill(words, words + sign_word_count(t.rows), 0u);
  for (int64_t r = 0; r < t.rows; ++r) {
    if (sign_bit(canonical.data(), canonical_row(r, t.rows, t.heads))) {
      words[r >> 5] |= 1u << (r & 31);
    }
  }
}

struct Work {
  std::vector<int32_t> start, order;  // counting sort of the columns by member
  std::vector<Owner> owners;
  std::vector<const float*> xs;  // columns by owner
  std::vector<float*> ys;
  std::vector<uint32_t> left;  // [owner][rank][words]
  std::vector<float> dots;     // [column][rank] (lowrank) or [column][factors] (adapter)
  std::vector<const float*> dot_rows;
};

struct Buffers {
  std::vector<float> w, scratch, noise, part, a;
  std::vector<uint32_t> words;
  std::vector<float*> at, parts;
};
thread_local Buffers buffers;

float* room(std::vector<float>& v, int64_t n) {
  if (static_cast<int64_t>(v.size()) < n) v.resize(static_cast<size_t>(n));
  return v.data();
}

// dots[c][k] = b_k . x_c of each column's own member.
void lowrank_dots(const edgees_tensor& t, int rank, Work& work, bool threads) {
  each(static_cast<int64_t>(work.owners.size()), threads, [&](int64_t i) {
    const Owner& o = work.owners[static_cast<size_t>(i)];
    if (o.c == 0.0f) return;
    Buffers& b = buffers;
    b.words.resize(static_cast<size_t>(sign_word_count(t.cols)));
    for (int k = 0; k < rank; ++k) {
      sign_words(o.member->key, 0, t.id, kStreamRight + static_cast<uint32_t>(k), t.cols,
                 b.words.data());
      for (int64_t c = o.first; c < o.first + o.count; ++c) {
        work.dots[static_cast<size_t>(c * rank + k)] =
            kernels().sign_dot(b.words.data(), work.xs[static_cast<size_t>(c)], t.cols);
      }
    }
  });
}

// dots[c][k] = pool_k . x_c for all K factors.
void pool_dots(const edgees_tensor& t, Work& work, int64_t n, bool threads) {
  constexpr int64_t kColumns = 24, kFactors = 8;
  const int64_t words = sign_word_count(t.cols);
  each((n + kColumns - 1) / kColumns, threads, [&](int64_t i) {
    const int64_t first = i * kColumns, count = std::min(kColumns, n - first);
    if (count < 4) {
      for (int64_t c = first; c < first + count; ++c)
        for (int k = 0; k < t.factors; ++k)
          work.dots[static_cast<size_t>(c * t.factors + k)] =
              kernels().sign_dot(t.pool + k * words, work.xs[static_cast<size_t>(c)], t.cols);
      return;
    }
    // The same sums in the same order, as a product with rows of +-1.
    float* rows = room(buffers.noise, kFactors * t.cols);
    float* out[kColumns];
    for (int k = 0; k < t.factors; k += static_cast<int>(kFactors)) {
      const int m = static_cast<int>(std::min<int64_t>(kFactors, t.factors - k));
      std::fill(rows, rows + m * t.cols, 0.0f);
      for (int j = 0; j < m; ++j)
        kernels().add_signs(rows + j * t.cols, t.cols, t.pool + (k + j) * words, 1.0f);
      for (int64_t c = 0; c < count; ++c)
        out[c] = &work.dots[static_cast<size_t>((first + c) * t.factors + k)];
      kernels().tile(rows, t.cols, m, t.cols, &work.xs[static_cast<size_t>(first)],
                     static_cast<int>(count), out);
    }
  });
}

// Rows row..row+n-1 of A in file order.
const float* factor_rows(const edgees_tensor& t, int64_t row, int64_t n) {
  if (!t.heads) return t.a + row * t.factors;
  float* out = room(buffers.a, n * t.factors);
  for (int64_t r = 0; r < n; ++r) {
    const float* from = t.a + canonical_row(row + r, t.rows, t.heads) * t.factors;
    std::copy(from, from + t.factors, out + r * t.factors);
  }
  return out;
}

// y[c][row..] += part[c][0..n-1] for columns first..first+count-1.
void add_parts(const float* part, int64_t ld, int64_t n, float* const* y, int64_t count) {
  for (int64_t c = 0; c < count; ++c)
    for (int64_t r = 0; r < n; ++r) y[c][r] += part[c * ld + r];
}

void add_tile(const float* w, int64_t ldw, int64_t rows, int64_t n, const float* const* x,
              int64_t count, float* const* y) {
  Buffers& b = buffers;
  float* part = room(b.part, count * rows);
  b.parts.resize(static_cast<size_t>(count));
  for (int64_t c = 0; c < count; ++c) b.parts[static_cast<size_t>(c)] = part + c * rows;
  kernels().tile(w, ldw, static_cast<int>(rows), n, x, static_cast<int>(count), b.parts.data());
  add_parts(part, rows, rows, y, count);
}

// One block of rows for all columns.
void row_block(const edgees_tensor& t, const edgees_noise_kind& noise, const Work& work,
               int64_t row, int64_t n, int64_t columns) {
  Buffers& b = buffers;
  float* scratch = room(b.scratch, t.cols / 16 + 1);
  float* w = room(b.w, n * t.cols);
  b.at.resize(static_cast<size_t>(columns));
  for (int64_t c = 0; c < columns; ++c) {
    b.at[static_cast<size_t>(c)] = work.ys[static_cast<size_t>(c)] + row;
  }
  const int64_t stride = plane_bytes(t.bits, t.cols);
  if (columns != 1 ||
      !kernels().dots(t.type, static_cast<const uint8_t*>(t.base) + row * t.row_stride,
                      t.row_stride, t.bits, t.plane + row * stride, stride,
                      std::ldexp(1.0f, t.span - t.bits), static_cast<int>(n), t.cols, work.xs[0],
                      b.at[0])) {
    decode_rows(t, row, n, scratch, w);
    kernels().tile(w, t.cols, static_cast<int>(n), t.cols, work.xs.data(),
                   static_cast<int>(columns), b.at.data());
  }
  if (t.factors) {
    add_tile(factor_rows(t, row, n), t.factors, n, t.factors, work.dot_rows.data(), columns,
             b.at.data());
  }
  if (noise.kind == EDGEES_NOISE_LOWRANK) return;
  for (const Owner& o : work.owners) {
    if (o.c == 0.0f) continue;
    float* e = room(b.noise, n * t.cols);
    std::fill(e, e + n * t.cols, 0.0f);
    for (int64_t r = 0; r < n; ++r) {
      add_eps_row(noise.kind, noise.rank, false, o.member->key, t.id,
                  canonical_row(row + r, t.rows, t.heads), t.cols, o.c, e + r * t.cols);
    }
    add_tile(e, t.cols, n, t.cols, &work.xs[static_cast<size_t>(o.first)], o.count,
             &b.at[static_cast<size_t>(o.first)]);
  }
}

// y_c += sum_k a_k * (c * dot_k): the member's own rank-1 terms, k in order.
void add_lowrank(const edgees_tensor& t, const edgees_noise_kind& noise, Work& work, bool threads) {
  const int rank = noise.rank;
  const int64_t words = sign_word_count(t.rows);
  const float scale = noise_scale(noise.kind, rank, false);
  work.left.resize(work.owners.size() * static_cast<size_t>(rank * words));
  each(static_cast<int64_t>(work.owners.size()), threads, [&](int64_t i) {
    const Owner& o = work.owners[static_cast<size_t>(i)];
    if (o.c == 0.0f) return;
    const float cs = o.c * scale;
    uint32_t* left = &work.left[static_cast<size_t>(i * rank * words)];
    for (int k = 0; k < rank; ++k) left_words(t, o.member->key, k, left + k * words);
    for (int64_t c = o.first; c < o.first + o.count; ++c)
      for (int k = 0; k < rank; ++k) {
        const int64_t at =
            t.factors
                ? c * t.factors +
                      static_cast<int64_t>((static_cast<uint64_t>(o.member->slot) * rank + k) %
                                           static_cast<uint64_t>(t.factors))
                : c * rank + k;
        kernels().add_signs(work.ys[static_cast<size_t>(c)], t.rows, left + k * words,
                            cs * work.dots[static_cast<size_t>(at)]);
      }
  });
}

// Sorts the columns by member: an owner's columns then lie side by side.
int group_columns(const edgees_tensor& t, const edgees_member* members, const int32_t* member,
                  int64_t n, const float* const* x, float* const* y, Work& work) {
  int32_t top = 0;
  for (int64_t c = 0; c < n; ++c) {
    if (member[c] < 0) return EDGEES_E_COLUMNS;
    top = std::max(top, member[c] + 1);
  }
  work.start.assign(static_cast<size_t>(top) + 1, 0);
  for (int64_t c = 0; c < n; ++c) ++work.start[static_cast<size_t>(member[c]) + 1];
  for (int32_t m = 0; m < top; ++m) work.start[static_cast<size_t>(m) + 1] += work.start[m];
  work.owners.clear();
  for (int32_t m = 0; m < top; ++m) {
    const int64_t first = work.start[m], count = work.start[m + 1] - first;
    if (count) work.owners.push_back({members + m, members[m].amplitude * t.rho, first, count});
  }
  work.xs.resize(static_cast<size_t>(n));
  work.ys.resize(static_cast<size_t>(n));
  for (int64_t c = 0; c < n; ++c) {
    const size_t at = static_cast<size_t>(work.start[member[c]]++);
    work.xs[at] = x[c];
    work.ys[at] = y[c];
  }
  return 0;
}

}  // namespace
}  // namespace edgees

using namespace edgees;

extern "C" {

int edgees_product(const edgees_tensor* t, const edgees_noise_kind* noise,
                   const edgees_member* members, const int32_t* member, int64_t n,
                   const float* const* x, float* const* y) {
  if (!t || !noise || n < 0 || !valid(*t, *noise)) return EDGEES_E_ARGUMENT;
  if (n == 0) return 0;
  static thread_local Work own;
  Work& work = own;  // in the tasks below `own` would be their thread's
  if (const int code = group_columns(*t, members, member, n, x, y, work)) return code;
  const bool threads = n > kFew;
  const bool lowrank = noise->kind == EDGEES_NOISE_LOWRANK;
  const bool perturbed = std::any_of(work.owners.begin(), work.owners.end(),
                                     [](const Owner& o) { return o.c != 0.0f; });
  if (t->factors) {
    work.dots.resize(static_cast<size_t>(n * t->factors));
    pool_dots(*t, work, n, threads);
    work.dot_rows.resize(static_cast<size_t>(n));
    for (int64_t c = 0; c < n; ++c) {
      work.dot_rows[static_cast<size_t>(c)] = &work.dots[static_cast<size_t>(c * t->factors)];
    }
  } else if (lowrank && perturbed) {
    work.dots.resize(static_cast<size_t>(n * noise->rank));
    lowrank_dots(*t, noise->rank, work, threads);
  }
  const int64_t fits = std::max<int64_t>(8, kCache / (t->cols * 4) / 8 * 8);
  const int64_t share =
      round_up((t->rows + 4 * edgees::threads() - 1) / (4 * edgees::threads()), 8);
  const int64_t rows = std::min<int64_t>({fits, share, n <= 2 ? 8 : 64});
  // With few columns a task takes several small blocks, so that they stay in the nearest cache.
  const int64_t per_task = n <= 2 ? share : rows;
  parallel_for((t->rows + per_task - 1) / per_task, [&](int64_t i, int) {
    const int64_t end = std::min(t->rows, (i + 1) * per_task);
    for (int64_t r = i * per_task; r < end; r += rows) {
      row_block(*t, *noise, work, r, std::min(rows, end - r), n);
    }
  });
  if (lowrank && perturbed) add_lowrank(*t, *noise, work, threads);
  return 0;
}

int edgees_row(const edgees_tensor* t, const edgees_noise_kind* noise, const edgees_member* member,
               int64_t row, float* out) {
  if (!t || !noise || !member || !valid(*t, *noise) || row < 0 || row >= t->rows) {
    return EDGEES_E_ARGUMENT;
  }
  Buffers& b = buffers;
  decode_rows(*t, row, 1, room(b.scratch, t->cols / 16 + 1), out);
  const int64_t r = canonical_row(row, t->rows, t->heads);
  const int64_t words = sign_word_count(t->cols);
  if (t->factors) {
    float* learned = room(b.noise, t->cols);
    std::fill(learned, learned + t->cols, 0.0f);
    for (int k = 0; k < t->factors; ++k) {
      kernels().add_signs(learned, t->cols, t->pool + k * words, t->a[r * t->factors + k]);
    }
    for (int64_t j = 0; j < t->cols; ++j) out[j] += learned[j];
  }
  if (member->amplitude == 0.0f) return 0;
  const float c = member->amplitude * t->rho;
  if (!t->factors) {
    add_eps_row(noise->kind, noise->rank, false, member->key, t->id, r, t->cols, c, out);
    return 0;
  }
  const uint32_t* right[kMaxRank];
  int left[kMaxRank];
  for (int k = 0; k < noise->rank; ++k) {
    uint32_t block[4];  // the one that holds row r
    kernels().philox(member->key, 0, t->id, kStreamLeft + static_cast<uint32_t>(k),
                     static_cast<uint32_t>(r / 128), 1, block);
    left[k] = sign_bit(block, r % 128) ? -1 : 1;
    right[k] =
        t->pool + static_cast<int64_t>((static_cast<uint64_t>(member->slot) * noise->rank + k) %
                                       static_cast<uint64_t>(t->factors)) *
                      words;
  }
  add_lowrank_row(noise->rank, right, left, c * noise_scale(noise->kind, noise->rank, false),
                  t->cols, out);
  return 0;
}

int edgees_vector(const edgees_tensor* t, const edgees_noise_kind* noise,
                  const edgees_member* member, float* out) {
  if (!t || !noise || !member || !t->base || t->cols <= 0 || row_bytes(t->type, t->cols) < 0) {
    return EDGEES_E_ARGUMENT;
  }
  kernels().decode(t->type, t->base, t->cols, out);
  if (t->delta) {
    for (int64_t j = 0; j < t->cols; ++j) out[j] += t->delta[j];
  }
  if (member->amplitude != 0.0f) {
    add_eps_row(noise->kind, noise->rank, true, member->key, t->id, 0, t->cols,
                member->amplitude * t->rho, out);
  }
  return 0;
}
}
