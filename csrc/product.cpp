// Products of one tuned tensor with the columns of many members in one pass over its weights.
//
//   y = decode(base + plane) x  +  A (B^T x)  +  c eps x        (plane: refined, A B^T: adapter)
//
// The first two terms are the same for all members. Lowrank noise needs only sign dots of the
// columns (c a_k (b_k . x)), in the adapter view those that B^T x holds anyway; the dense kinds
// make the rows of eps anew for each member. Block types are multiplied as 16-bit integers
// (cpu/scalar_integer.inl), float types and what does not fit as float32. Every output is one sum
// in one fixed order, whatever else is in the batch and however many threads work.
#include "product.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "blocks.h"
#include "integer.h"
#include "kernels.h"
#include "noise.h"
#include "parallel.h"

namespace edgees {
namespace {

constexpr int64_t kCache = 256 << 10;  // bytes of decoded rows held while columns pass by

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

bool valid(const edgees_tensor& t, const edgees_noise_kind& noise) {
  if (t.rows <= 0 || t.cols <= 0 || !t.base) return false;
  const bool apart = is_table(t.type) && t.absmax;
  if (apart ? t.bits && t.cols % Table4::weights : row_bytes(t.type, t.cols) < 0) return false;
  if (t.bits != 0 && t.bits != 2 && t.bits != 4 && t.bits != 8) return false;
  if (t.bits && !t.plane) return false;
  if (t.factors && (!t.a || !t.pool || noise.kind != EDGEES_NOISE_LOWRANK)) return false;
  return noise.rank >= 1 && noise.rank <= kMaxRank;
}

// Whether the weights fit the integer products.
bool integral(const edgees_tensor& t) {
  if (is_table(t.type)) {
    const int reach = 1 << (kTableBits - kTableCellBits + t.span - 1);  // of the plane
    return t.cols % Table4::weights == 0 && (!t.bits || (1 << kTableBits) + reach < kCodeLimit);
  }
  int most = 0;
  with_format(t.type, [&](auto* format) {
    using Block = std::remove_pointer_t<decltype(format)>;
    most = std::max(-Block::lo, Block::hi);
  });
  if (!most) return false;
  return !t.bits || (most << t.bits) + (1 << (t.span + t.bits - 1)) < kCodeLimit;
}

// The columns of one member: order[first..first+count-1].
struct Owner {
  const edgees_member* member;
  float c;  // amplitude * rho
  int64_t first, count;
};

struct Buffers {
  std::vector<float> w, scratch, noise, part, a, scale, offset;
  std::vector<int16_t> codes, panel;
  std::vector<float> panel_scale, panel_sum;
  std::vector<uint32_t> words;
  std::vector<uint8_t> blocks;
  std::vector<float*> at, parts;
  std::vector<const float*> xs;
};
thread_local Buffers buffers;

template <class T>
T* room(std::vector<T>& v, int64_t n) {
  if (static_cast<int64_t>(v.size()) < n) v.resize(static_cast<size_t>(n));
  return v.data();
}

// Weights k..k+width-1 of a row of codes with their absmax apart, as blocks.
void to_blocks(const edgees_tensor& t, int64_t row, int64_t k, int64_t width, uint8_t* out) {
  const int64_t first = row * t.cols + k;
  const uint8_t* codes = static_cast<const uint8_t*>(t.base) + first / 2;
  const float* absmax = t.absmax + first / Table4::weights;
  for (int64_t i = 0; i < width; i += Table4::weights, ++absmax) {
    memcpy(out, absmax, 4);
    memcpy(out + 4, codes + i / 2, 32);
    out += sizeof(Table4);
  }
}

// Any row of codes with their absmax apart: blocks may begin and end within it.
void decode_apart(const edgees_tensor& t, int64_t row, float* out) {
  const uint8_t* codes = static_cast<const uint8_t*>(t.base);
  const float* value = table_of(t.type);
  for (int64_t i = row * t.cols; i < (row + 1) * t.cols; ++i)
    *out++ = value[i % 2 ? codes[i / 2] & 15 : codes[i / 2] >> 4] * t.absmax[i / Table4::weights];
}

void decode_rows(const edgees_tensor& t, int64_t row, int64_t n, float* scratch, float* out) {
  if (t.absmax && t.cols % Table4::weights) {
    for (int64_t r = row; r < row + n; ++r, out += t.cols) decode_apart(t, r, out);
    return;
  }
  const Plane plane{t.bits, t.span, t.cell};
  const int64_t stride = plane_bytes(t.bits, t.cols);
  for (int64_t r = row; r < row + n; ++r) {
    const uint8_t* base = static_cast<const uint8_t*>(t.base) + r * t.row_stride;
    if (t.absmax) {
      uint8_t* blocks = room(buffers.blocks, row_bytes(t.type, t.cols));
      to_blocks(t, r, 0, t.cols, blocks);
      base = blocks;
    }
    decode_row(t.type, base, t.cols, plane, t.plane + r * stride, scratch,
               out + (r - row) * t.cols);
  }
}

// Bits of a word, each followed by an empty one.
uint64_t spread(uint64_t v) {
  v = (v | v << 16) & 0x0000FFFF0000FFFFu;
  v = (v | v << 8) & 0x00FF00FF00FF00FFu;
  v = (v | v << 4) & 0x0F0F0F0F0F0F0F0Fu;
  v = (v | v << 2) & 0x3333333333333333u;
  return (v | v << 1) & 0x5555555555555555u;
}

// Left factor k of a member as packed signs in file order (`canonical_row`: halves interleaved).
void left_words(const edgees_tensor& t, uint64_t key, int k, uint32_t* words) {
  const uint32_t stream = kStreamLeft + static_cast<uint32_t>(k);
  if (!t.heads) {
    sign_words(key, 0, t.id, stream, t.rows, words);
    return;
  }
  static thread_local std::vector<uint32_t> canonical;
  canonical.resize(static_cast<size_t>(sign_word_count(t.rows)));
  sign_words(key, 0, t.id, stream, t.rows, canonical.data());
  const int64_t half = t.rows / t.heads / 2;
  if (half % 32 == 0) {
    for (int64_t h = 0; h < t.heads; ++h)
      for (int64_t j = 0; j < half; j += 32) {
        const uint32_t* from = &canonical[static_cast<size_t>((2 * h * half + j) / 32)];
        const uint64_t both = spread(from[0]) | spread(from[half / 32]) << 1;
        memcpy(words + (2 * h * half + 2 * j) / 32, &both, 8);
      }
    return;
  }
  std::fill(words, words + sign_word_count(t.rows), 0u);
  for (int64_t r = 0; r < t.rows; ++r) {
    if (sign_bit(canonical.data(), canonical_row(r, t.rows, t.heads))) {
      words[r >> 5] |= 1u << (r & 31);
    }
  }
}

// Which factor of the pool is right factor k of a member.
int64_t pool_index(const edgees_tensor& t, const edgees_noise_kind& noise,
                   const edgees_member& member, int k) {
  return static_cast<int64_t>((static_cast<uint64_t>(member.slot) * noise.rank + k) %
                              static_cast<uint64_t>(t.factors));
}

// Rows of A in file order.
const float* factor_rows(const edgees_tensor& t, int64_t row, int64_t n) {
  if (!t.heads) return t.a + row * t.factors;
  float* out = room(buffers.a, n * t.factors);
  for (int64_t r = 0; r < n; ++r) {
    const float* from = t.a + canonical_row(row + r, t.rows, t.heads) * t.factors;
    std::copy(from, from + t.factors, out + r * t.factors);
  }
  return out;
}

// y[c][0..rows-1] += rows of w . x[c].
void add_tile(const float* w, int64_t ldw, int64_t rows, int64_t n, const float* const* x,
              int64_t count, float* const* y) {
  Buffers& b = buffers;
  float* part = room(b.part, count * rows);
  b.parts.resize(static_cast<size_t>(count));
  for (int64_t c = 0; c < count; ++c) b.parts[static_cast<size_t>(c)] = part + c * rows;
  kernels().tile(w, ldw, static_cast<int>(rows), n, x, static_cast<int>(count), b.parts.data());
  for (int64_t c = 0; c < count; ++c)
    for (int64_t r = 0; r < rows; ++r) y[c][r] += part[c * rows + r];
}

}  // namespace

void Columns::set(const float* const* from, int64_t count, int64_t width) {
  n = count;
  cols = width;
  x.assign(from, from + count);
  integers_ = false;
}

// One call of `product`.
class Product {
 public:
  Product(const edgees_tensor& t, const edgees_noise_kind& noise, Columns& columns, float* const* y)
      : t_(t),
        noise_(noise),
        in_(columns),
        y_(y),
        n_(columns.n),
        lanes_(kernels().lanes),
        groups_(t.cols / kGroup),
        integers_(integral(t)),
        few_(columns.n <= few()) {}

  int run(const edgees_member* members, const int32_t* owner) {
    if (const int code = group(members, owner)) return code;
    perturbed_ =
        std::any_of(w_.owners.begin(), w_.owners.end(), [](const Owner& o) { return o.c != 0.0f; });
    sign_integers_ = perturbed_ && noise_.kind == EDGEES_NOISE_SIGN && t_.cols % kGroup == 0;
    // What does not depend on each other is done at once: threads meet as seldom as may be.
    const bool pack = (integers_ || sign_integers_) && !in_.integers_;
    const int64_t packs = !pack ? 0 : few_ ? 1 : panels();
    const int64_t pools = t_.factors ? (n_ + kChunk - 1) / kChunk : 0;
    const int64_t owners = static_cast<int64_t>(w_.owners.size());
    const bool own_dots = lowrank() && !t_.factors;
    if (pack) room_for_integers();
    if (t_.factors) dots_.resize(static_cast<size_t>(n_ * t_.factors));
    if (own_dots) dots_.resize(static_cast<size_t>(n_ * noise_.rank));
    if (lowrank()) room_for_signs();
    each(packs + pools + (own_dots ? owners : 0), !few_, [&](int64_t i) {
      if (i < packs) return to_integers(i);
      if (i < packs + pools) return pool_dots((i - packs) * kChunk);
      signs_of(i - packs - pools);
    });
    in_.integers_ = in_.integers_ || pack;
    if (lowrank() && t_.factors) {
      each(owners, !few_, [&](int64_t i) { signs_of(i); });
    }
    if (sign_integers_) {
      tables_.resize(static_cast<size_t>(n_ * 4 * t_.cols));
      each(owners, !few_, [&](int64_t i) { tables_of(i); });
    }
    const int64_t fits = std::max<int64_t>(32, kCache / (t_.cols * 4) / 32 * 32);
    const int64_t parts = 4 * edgees::threads();
    const int64_t share = round_up((t_.rows + parts - 1) / parts, 32);
    const int64_t block = few_                       ? 32
                          : integers_ && !t_.factors ? kPanelRows
                          : integers_                ? 96
                                                     : std::min<int64_t>({fits, share, 96});
    // Neighbouring blocks make a task: a block prefetches the next one.
    const int64_t per_task = few_ ? share : std::max<int64_t>(1, share / 2 / block) * block;
    parallel_for((t_.rows + per_task - 1) / per_task, [&](int64_t i, int) {
      const int64_t end = std::min(t_.rows, (i + 1) * per_task);
      for (int64_t r = i * per_task; r < end; r += block) rows(r, std::min(block, end - r));
    });
    return 0;
  }

 private:
  static constexpr int64_t kChunk = 32;   // columns of a task
  static constexpr int kPanelRows = 24;   // rows decoded at once: a multiple of what panels take
  static constexpr int kPanelSigns = 12;  // the same for dense signs
  static constexpr int kStride = kPanelRows;

  template <class Body>
  static void each(int64_t n, bool threads, Body body) {
    if (threads) {
      parallel_for(n, [&](int64_t i, int) { body(i); });
    } else {
      for (int64_t i = 0; i < n; ++i) body(i);
    }
  }

  // Columns up to which each is multiplied by itself: a panel would be mostly empty.
  int64_t few() const { return std::max<int64_t>(1, lanes_ / 4); }
  int64_t panels() const { return (n_ + lanes_ - 1) / lanes_; }

  // Sorts the columns by member.
  int group(const edgees_member* members, const int32_t* owner) {
    int32_t top = 0;
    for (int64_t c = 0; c < n_; ++c) {
      if (owner[c] < 0) return EDGEES_E_COLUMNS;
      top = std::max(top, owner[c] + 1);
    }
    w_.start.assign(static_cast<size_t>(top) + 1, 0);
    for (int64_t c = 0; c < n_; ++c) ++w_.start[static_cast<size_t>(owner[c]) + 1];
    for (int32_t m = 0; m < top; ++m) w_.start[static_cast<size_t>(m) + 1] += w_.start[m];
    w_.owners.clear();
    for (int32_t m = 0; m < top; ++m) {
      const int64_t first = w_.start[m], count = w_.start[m + 1] - first;
      if (count) w_.owners.push_back({members + m, members[m].amplitude * t_.rho, first, count});
    }
    w_.order.resize(static_cast<size_t>(n_));
    for (int64_t c = 0; c < n_; ++c) {
      w_.order[static_cast<size_t>(w_.start[owner[c]]++)] = static_cast<int32_t>(c);
    }
    return 0;
  }

  void room_for_integers() {
    if (keeps_columns()) room(in_.q_, n_ * t_.cols);
    room(in_.scale_, n_ * groups_);
    room(in_.sum_, n_ * groups_);
    if (few_) return;
    room(in_.panels_, panels() * lanes_ * t_.cols);
    room(in_.panel_scale_, panels() * lanes_ * groups_);
    room(in_.panel_sum_, panels() * lanes_ * groups_);
  }

  void room_for_signs() {
    const int64_t of_rank = noise_.rank, words = of_rank * sign_word_count(t_.rows);
    left_.resize(w_.owners.size() * static_cast<size_t>(words));
    if (!in_panels()) return;
    panel_left_.resize(static_cast<size_t>(panels() * lanes_ * words));
    panel_by_.assign(static_cast<size_t>(panels() * lanes_ * of_rank), 0.0f);
  }

  // Whether columns are read apart from their panels.
  bool keeps_columns() const { return few_ || noise_.kind == EDGEES_NOISE_SIGN; }

  // All columns (few), or those of panel i.
  void to_integers(int64_t i) {
    const int64_t first = few_ ? 0 : i * lanes_, count = few_ ? n_ : std::min(lanes_, n_ - first);
    int16_t* q = keeps_columns() ? &in_.q_[first * t_.cols] : room(buffers.panel, lanes_ * t_.cols);
    for (int64_t c = first; c < first + count; ++c) {
      kernels().quantize(in_.x[static_cast<size_t>(c)], t_.cols, q + (c - first) * t_.cols,
                         &in_.scale_[c * groups_], &in_.sum_[c * groups_]);
    }
    if (few_) return;
    kernels().interleave(q, t_.cols, static_cast<int>(count), t_.cols,
                         &in_.panels_[first * t_.cols]);
    scales_of(
        count, [&](int64_t c) { return first + c; }, &in_.panel_scale_[first * groups_],
        &in_.panel_sum_[first * groups_]);
  }

  // Scales and sums of a panel of columns at(0..count-1), [group][lanes]; zeros where none is.
  template <class At>
  void scales_of(int64_t count, At at, float* scale, float* sum) const {
    for (int64_t g = 0; g < groups_; ++g)
      for (int64_t c = 0; c < lanes_; ++c) {
        const int64_t from = c < count ? at(c) * groups_ + g : -1;
        scale[g * lanes_ + c] = from < 0 ? 0.0f : in_.scale_[static_cast<size_t>(from)];
        sum[g * lanes_ + c] = from < 0 ? 0.0f : in_.sum_[static_cast<size_t>(from)];
      }
  }

  // A member's columns for `sign_columns`.
  void tables_of(int64_t i) {
    const Owner& o = w_.owners[static_cast<size_t>(i)];
    if (o.c == 0.0f || o.count > kSignColumns) return;
    for (int64_t j = o.first; j < o.first + o.count; ++j) {
      const int64_t c = w_.order[static_cast<size_t>(j)];
      kernels().sign_table(&in_.q_[c * t_.cols], t_.cols, &tables_[c * 4 * t_.cols]);
    }
  }

  // dots[c][k] = pool_k . x_c for all factors, columns first..
  void pool_dots(int64_t first) {
    const int64_t words = sign_word_count(t_.cols), end = std::min(n_, first + kChunk);
    for (int64_t c = first; c < end; ++c)
      for (int k = 0; k < t_.factors; ++k) {
        dots_[static_cast<size_t>(c * t_.factors + k)] =
            kernels().sign_dot(t_.pool + k * words, in_.x[static_cast<size_t>(c)], t_.cols);
      }
  }

  // A member's left signs, and right_k . x of its columns.
  void signs_of(int64_t i) {
    const Owner& o = w_.owners[static_cast<size_t>(i)];
    if (o.c == 0.0f) return;
    const int rank = noise_.rank;
    const int64_t words = sign_word_count(t_.rows);
    uint32_t* left = &left_[static_cast<size_t>(i * rank * words)];
    for (int k = 0; k < rank; ++k) left_words(t_, o.member->key, k, left + k * words);
    uint32_t* right = room(buffers.words, sign_word_count(t_.cols));
    for (int k = 0; k < rank; ++k) {
      if (!t_.factors) {
        sign_words(o.member->key, 0, t_.id, kStreamRight + static_cast<uint32_t>(k), t_.cols,
                   right);
      }
      for (int64_t j = o.first; j < o.first + o.count; ++j) {
        const int64_t c = w_.order[static_cast<size_t>(j)];
        if (!t_.factors) {
          dots_[static_cast<size_t>(c * rank + k)] =
              kernels().sign_dot(right, in_.x[static_cast<size_t>(c)], t_.cols);
        }
        if (!in_panels()) continue;
        const int64_t at = c / lanes_ * rank + k, lane = c % lanes_;
        panel_by_[static_cast<size_t>(at * lanes_ + lane)] = coefficient(o, c, k);
        uint32_t* to = &panel_left_[static_cast<size_t>(at * words * lanes_ + lane)];
        for (int64_t i = 0; i < words; ++i) to[i * lanes_] = left[k * words + i];
      }
    }
  }

  bool lowrank() const { return perturbed_ && noise_.kind == EDGEES_NOISE_LOWRANK; }
  // Lowrank noise is added to whole panels, or to columns where these are few or floats.
  bool in_panels() const { return lowrank() && integers_ && !few_ && !t_.factors; }

  // What the left signs of a member's factor k are multiplied with, for its column c.
  float coefficient(const Owner& o, int64_t c, int k) const {
    const int rank = noise_.rank;
    const int64_t at =
        t_.factors ? c * t_.factors + pool_index(t_, noise_, *o.member, k) : c * rank + k;
    return o.c * noise_scale(noise_.kind, rank, false) * dots_[static_cast<size_t>(at)];
  }

  // One block of rows for all columns; row is a multiple of 32 where signs are added by column.
  void rows(int64_t row, int64_t n) {
    Buffers& b = buffers;
    b.at.resize(static_cast<size_t>(n_));
    for (int64_t c = 0; c < n_; ++c) b.at[static_cast<size_t>(c)] = y_[c] + row;
    if (integers_) {
      integer_rows(row, n);
    } else {
      float* w = room(b.w, n * t_.cols);
      decode_rows(t_, row, n, room(b.scratch, t_.cols / 16 + 1), w);
      kernels().tile(w, t_.cols, static_cast<int>(n), t_.cols, in_.x.data(), static_cast<int>(n_),
                     b.at.data());
    }
    if (t_.factors) {
      b.xs.resize(static_cast<size_t>(n_));
      for (int64_t c = 0; c < n_; ++c) b.xs[static_cast<size_t>(c)] = &dots_[c * t_.factors];
      add_tile(factor_rows(t_, row, n), t_.factors, n, t_.factors, b.xs.data(), n_, b.at.data());
    }
    if (lowrank()) {
      if (!in_panels()) add_lowrank(row, n);
    } else if (perturbed_) {
      for (const Owner& o : w_.owners)
        if (o.c != 0.0f) add_dense_rows(o, row, n);
    }
  }

  // A few rows and a piece of their length at a time, so that the integers stay in the nearest
  // cache.
  void integer_rows(int64_t row, int64_t n) {
    Buffers& b = buffers;
    const int64_t step = piece();
    const int group = cell_group(t_.type), at_once = few_ ? 16 : kPanelRows;
    int16_t* q = room(b.codes, kPanelRows * step);
    float* scale = room(b.scale, kStride * step / group);
    float* offset = room(b.offset, kStride * step / group);
    const Codes16 w{q, step, scale, offset, has_offset(), kStride, group};
    float* out = room(b.part, kPanelRows * panels() * lanes_);
    for (int64_t first = 0; first < n; first += at_once) {
      const int64_t some = std::min<int64_t>(at_once, n - first);
      if (few_) {
        for (int64_t c = 0; c < n_; ++c) std::fill_n(b.at[c] + first, some, 0.0f);
        if (n_ == 1 && is_table(t_.type) && !t_.bits &&
            kernels().table_column(piece_of(row + first, 0, t_.cols, at_once),
                                   static_cast<int>(some), t_.cols, in_.q_.data(),
                                   in_.scale_.data(), b.at[0] + first)) {
          continue;
        }
      }
      for (int64_t k = 0; k < t_.cols; k += step) {
        const int64_t width = std::min(step, t_.cols - k), g = k / kGroup;
        kernels().codes(piece_of(row + first, k, width, at_once), static_cast<int>(some), width, w);
        if (few_) {
          for (int64_t c = 0; c < n_; ++c) {
            kernels().column(w, static_cast<int>(some), width, &in_.q_[c * t_.cols + k],
                             &in_.scale_[c * groups_ + g], &in_.sum_[c * groups_ + g],
                             b.at[c] + first);
          }
        } else {
          for (int64_t p = 0; p < panels(); ++p) {
            kernels().panel(
                w, k != 0, static_cast<int>(some), width, &in_.panels_[(p * t_.cols + k) * lanes_],
                &in_.panel_scale_[(p * groups_ + g) * lanes_],
                &in_.panel_sum_[(p * groups_ + g) * lanes_], out + p * kPanelRows * lanes_);
          }
        }
      }
      if (few_) continue;
      const int rank = in_panels() ? noise_.rank : 0;
      const int64_t words = sign_word_count(t_.rows);
      for (int64_t p = 0; p < panels(); ++p) {
        for (int k = 0; k < rank; ++k) {
          const int64_t at = p * rank + k;
          kernels().add_panel_signs(out + p * kPanelRows * lanes_, static_cast<int>(some),
                                    row + first, &panel_left_[at * words * lanes_],
                                    &panel_by_[at * lanes_]);
        }
        kernels().unpanel(out + p * kPanelRows * lanes_, static_cast<int>(some),
                          static_cast<int>(std::min(lanes_, n_ - p * lanes_)),
                          &b.at[static_cast<size_t>(p * lanes_)], first);
      }
    }
  }

  // Weights of a row that are multiplied at a time, whole blocks: kPanelRows of them and a panel of
  // as many activations fit the nearest cache together.
  int64_t piece() const {
    int64_t block = is_table(t_.type) ? Table4::weights : kGroup;
    with_format(t_.type,
                [&](auto* format) { block = std::remove_pointer_t<decltype(format)>::weights; });
    const int64_t most = std::max<int64_t>(block, (few_ ? 640 : 320) / block * block);
    const int64_t pieces = (t_.cols + most - 1) / most;
    return std::min(t_.cols, round_up((t_.cols + pieces - 1) / pieces, block));
  }

  // Weights k..k+width-1 of the rows from `row` on; the next piece, or the next rows' first, is
  // wanted soon after, and pieces are too short for the hardware to see where they go.
  Rows piece_of(int64_t row, int64_t k, int64_t width, int64_t at_once) const {
    const bool apart = t_.absmax != nullptr;
    const auto bytes = [&](int64_t n) { return !n ? 0 : apart ? n / 2 : row_bytes(t_.type, n); };
    const int64_t base = bytes(width), plane = plane_bytes(t_.bits, width);
    const int64_t bases = apart ? bytes(t_.cols) : t_.row_stride;
    const int64_t planes = plane_bytes(t_.bits, t_.cols);
    const int64_t base_before = bytes(k), plane_before = plane_bytes(t_.bits, k);
    const int64_t absmax = t_.cols / Table4::weights;
    Rows rows{
        t_.type, static_cast<const uint8_t*>(t_.base) + row * bases + base_before, bases,  t_.bits,
        t_.span, t_.plane ? t_.plane + row * planes + plane_before : nullptr,      planes, base,
        plane,   apart ? t_.absmax + row * absmax + k / Table4::weights : nullptr, absmax};
    if (k + width == t_.cols) {
      const bool more = row + at_once < t_.rows;
      rows.next_base = more ? at_once * bases - base_before : 0;
      rows.next_plane = more ? at_once * planes - plane_before : 0;
    }
    return rows;
  }

  bool has_offset() const {
    bool offset = false;
    with_format(t_.type,
                [&](auto* format) { offset = std::remove_pointer_t<decltype(format)>::offset; });
    return offset;
  }

  // y_c += sum_k a_k * (c * dot_k): the member's own rank-1 terms, k in order.
  void add_lowrank(int64_t row, int64_t n) {
    const int rank = noise_.rank;
    const int64_t words = sign_word_count(t_.rows);
    for (size_t i = 0; i < w_.owners.size(); ++i) {
      const Owner& o = w_.owners[i];
      if (o.c == 0.0f) continue;
      const uint32_t* left = &left_[i * static_cast<size_t>(rank * words)] + row / 32;
      for (int64_t j = o.first; j < o.first + o.count; ++j) {
        const int64_t c = w_.order[static_cast<size_t>(j)];
        for (int k = 0; k < rank; ++k) {
          kernels().add_signs(y_[c] + row, n, left + k * words, coefficient(o, c, k));
        }
      }
    }
  }

  // y += c eps x for the columns of one member: rows of eps made anew.
  void add_dense_rows(const Owner& o, int64_t row, int64_t n) {
    Buffers& b = buffers;
    if (sign_integers_) return add_sign_rows(o, row, n);
    float* e = room(b.noise, n * t_.cols);
    std::fill(e, e + n * t_.cols, 0.0f);
    for (int64_t r = 0; r < n; ++r) {
      add_eps_row(noise_.kind, noise_.rank, false, o.member->key, t_.id,
                  canonical_row(row + r, t_.rows, t_.heads), t_.cols, o.c, e + r * t_.cols);
    }
    std::vector<const float*> xs;
    std::vector<float*> ys;
    for (int64_t j = o.first; j < o.first + o.count; ++j) {
      const size_t c = static_cast<size_t>(w_.order[static_cast<size_t>(j)]);
      xs.push_back(in_.x[c]);
      ys.push_back(b.at[c]);
    }
    add_tile(e, t_.cols, n, t_.cols, xs.data(), o.count, ys.data());
  }

  void add_sign_rows(const Owner& o, int64_t row, int64_t n) {
    if (o.count <= kSignColumns) return add_sign_columns(o, row, n);
    Buffers& b = buffers;
    int16_t* q = room(b.codes, kStride * t_.cols);
    float* scale = room(b.scale, kStride * groups_);
    std::fill_n(scale, kStride * groups_, o.c);
    const Codes16 w{q, t_.cols, scale, scale, false, kStride, kGroup};
    uint32_t* words = room(b.words, sign_word_count(t_.cols));
    float* out = room(b.part, kStride * lanes_);
    for (int64_t first = 0; first < n; first += kPanelSigns) {
      const int64_t some = std::min<int64_t>(kPanelSigns, n - first);
      for (int64_t r = 0; r < some; ++r) {
        const int64_t at = canonical_row(row + first + r, t_.rows, t_.heads);
        sign_words(o.member->key, static_cast<uint32_t>(at), t_.id, kStreamSign, t_.cols, words);
        kernels().signs(words, t_.cols, q + r * t_.cols);
      }
      for (int64_t j = o.first; j < o.first + o.count; j += lanes_) {
        const int64_t count = std::min(o.first + o.count - j, lanes_);
        gather(&w_.order[static_cast<size_t>(j)], count);
        kernels().panel(w, false, static_cast<int>(some), t_.cols, b.panel.data(),
                        b.panel_scale.data(), b.panel_sum.data(), out);
        for (int64_t k = 0; k < count; ++k) {
          float* y = b.at[static_cast<size_t>(w_.order[static_cast<size_t>(j + k)])] + first;
          for (int64_t r = 0; r < some; ++r) y[r] += out[r * lanes_ + k];
        }
      }
    }
  }

  // The same for a few columns: no integers of the signs are written anywhere.
  void add_sign_columns(const Owner& o, int64_t row, int64_t n) {
    uint32_t rows[kSignRows];
    float y[kSignColumns][kSignRows];
    SignColumn columns[kSignColumns];
    const int32_t* order = &w_.order[static_cast<size_t>(o.first)];
    for (int64_t k = 0; k < o.count; ++k)
      columns[k] = {&tables_[order[k] * 4 * t_.cols], &in_.scale_[order[k] * groups_], y[k]};
    for (int64_t first = 0; first < n; first += kSignRows) {
      const int64_t some = std::min<int64_t>(kSignRows, n - first);
      for (int64_t r = 0; r < some; ++r)
        rows[r] = static_cast<uint32_t>(canonical_row(row + first + r, t_.rows, t_.heads));
      kernels().sign_columns(o.member->key, t_.id, rows, static_cast<int>(some), t_.cols, columns,
                             static_cast<int>(o.count), o.c);
      for (int64_t k = 0; k < o.count; ++k) {
        float* to = buffers.at[static_cast<size_t>(order[k])] + first;
        for (int64_t r = 0; r < some; ++r) to[r] += y[k][r];
      }
    }
  }

  // A panel of any columns.
  void gather(const int32_t* order, int64_t count) {
    Buffers& b = buffers;
    int16_t* q = room(b.panel, 2 * lanes_ * t_.cols) + lanes_ * t_.cols;
    for (int64_t c = 0; c < count; ++c)
      std::copy_n(&in_.q_[order[c] * t_.cols], t_.cols, q + c * t_.cols);
    scales_of(
        count, [&](int64_t c) { return int64_t{order[c]}; }, room(b.panel_scale, lanes_ * groups_),
        room(b.panel_sum, lanes_ * groups_));
    kernels().interleave(q, t_.cols, static_cast<int>(count), t_.cols, b.panel.data());
  }

  struct Work {
    std::vector<int32_t> start, order;
    std::vector<Owner> owners;
  };

  const edgees_tensor& t_;
  const edgees_noise_kind& noise_;
  Columns& in_;
  float* const* y_;
  const int64_t n_, lanes_, groups_;
  const bool integers_, few_;
  bool perturbed_ = false, sign_integers_ = false;
  Work w_;
  std::vector<uint32_t> left_;        // [owner][rank][words]
  std::vector<uint32_t> panel_left_;  // [panel][rank][words][lanes]
  std::vector<float> panel_by_;       // [panel][rank][lanes]
  std::vector<int32_t> tables_;       // [column][4 cols]
  std::vector<float> dots_;           // [column][rank] (lowrank) or [column][factors] (adapter)
};

int product(const edgees_tensor& t, const edgees_noise_kind& noise, const edgees_member* members,
            const int32_t* owner, Columns& columns, float* const* y) {
  if (!valid(t, noise) || columns.cols != t.cols) return EDGEES_E_ARGUMENT;
  if (columns.n == 0) return 0;
  return Product(t, noise, columns, y).run(members, owner);
}

namespace {

// The members of a call one by one. EDGEES_E_COLUMNS: a column belongs to none of them.
int members_of(const edgees_members& m, const int32_t* owner, int64_t n,
               std::vector<edgees_member>& table) {
  for (int64_t i = 0; i < n; ++i)
    if (owner[i] < 0 || owner[i] >= m.count) return EDGEES_E_COLUMNS;
  for (int64_t i = 0; i < m.count; ++i)
    table.push_back({m.keys[i], m.amplitudes[i], m.slots ? m.slots[i] : 0});
  return 0;
}

}  // namespace
}  // namespace edgees

using namespace edgees;

extern "C" {

int edgees_product(const edgees_tensor* t, const edgees_noise_kind* noise,
                   const edgees_member* members, const int32_t* member, int64_t n,
                   const float* const* x, float* const* y) {
  if (!t || !noise || n < 0) return EDGEES_E_ARGUMENT;
  Columns columns;
  columns.set(x, n, t->cols);
  return product(*t, *noise, members, member, columns, y);
}

int edgees_product_rows(const edgees_tensor* t, const edgees_noise_kind* noise,
                        const edgees_members* members, const int32_t* owner, int64_t n,
                        const float* x, int64_t x_stride, float* y, int64_t y_stride) {
  if (!t || n < 0) return EDGEES_E_ARGUMENT;
  std::vector<edgees_member> table;
  if (const int code = members_of(*members, owner, n, table)) return code;
  std::vector<const float*> from(static_cast<size_t>(n));
  std::vector<float*> to(static_cast<size_t>(n));
  for (int64_t c = 0; c < n; ++c) {
    from[static_cast<size_t>(c)] = x + c * x_stride;
    to[static_cast<size_t>(c)] = y + c * y_stride;
  }
  return edgees_product(t, noise, table.data(), owner, n, from.data(), to.data());
}

int64_t edgees_peak(int64_t n) {
  std::atomic<int64_t> total{0};
  parallel_for(edgees::threads(), [&](int64_t, int) { total += kernels().peak(n); });
  return total;
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
    right[k] = t->pool + pool_index(*t, *noise, *member, k) * words;
  }
  add_lowrank_row(noise->rank, right, left, c * noise_scale(noise->kind, noise->rank, false),
                  t->cols, out);
  return 0;
}

int edgees_rows(const edgees_tensor* t, const edgees_noise_kind* noise,
                const edgees_members* members, const int32_t* owner, int64_t n, const int64_t* rows,
                float* out) {
  if (!t || n < 0) return EDGEES_E_ARGUMENT;
  std::vector<edgees_member> table;
  if (const int code = members_of(*members, owner, n, table)) return code;
  std::atomic<int> fault{0};
  each_row(n, t->cols, [&](int64_t i) {
    const int code =
        edgees_row(t, noise, &table[static_cast<size_t>(owner[i])], rows[i], out + i * t->cols);
    if (code) fault = code;
  });
  return fault;
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
