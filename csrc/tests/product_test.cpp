// Codecs, planes and products of every arm against the scalar one; products against themselves:
// alone, in company, with other thread counts, in every view.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "../api.h"
#include "../blocks.h"
#include "../integer.h"
#include "../kernels.h"
#include "../noise.h"

using namespace edgees;

namespace {

int failures = 0;
void check(bool ok, const char* what, int detail) {
  if (ok) return;
  ++failures;
  printf("FAIL %s (%d)\n", what, detail);
}

uint32_t state = 12345;
uint32_t random_bits() {
  state = state * 1664525u + 1013904223u;
  return state >> 8;
}
float random_float() { return static_cast<float>(random_bits() & 0xFFFF) / 32768.0f - 1.0f; }

const int kTypes[] = {kTypeF32,  kTypeF16,  kTypeBF16, kTypeQ4_0, kTypeQ4_1, kTypeQ5_0, kTypeQ5_1,
                      kTypeQ8_0, kTypeQ4_K, kTypeQ5_K, kTypeQ6_K, kTypeNF4,  kTypeFP4};

// Random codes, with scales that are small halves.
std::vector<uint8_t> random_rows(int type, int64_t rows, int64_t cols) {
  std::vector<uint8_t> raw(static_cast<size_t>(rows * row_bytes(type, cols)));
  for (auto& b : raw) b = static_cast<uint8_t>(random_bits());
  if (type == kTypeF32) {
    for (size_t i = 0; i < raw.size(); i += 4) {
      const float v = random_float();
      memcpy(&raw[i], &v, 4);
    }
  } else if (is_float(type)) {  // exponents near those of one
    for (size_t i = 1; i < raw.size(); i += 2)
      raw[i] = static_cast<uint8_t>((raw[i] & 0x83) | (type == kTypeF16 ? 0x34 : 0x3C));
  } else if (is_table(type)) {
    for (size_t i = 0; i < raw.size(); i += sizeof(Table4)) {
      const float v = random_float();
      memcpy(&raw[i], &v, 4);
    }
  } else {
    with_format(type, [&](auto* format) {
      using Block = std::remove_pointer_t<decltype(format)>;
      for (size_t i = 0; i < raw.size(); i += sizeof(Block)) {
        Block* b = reinterpret_cast<Block*>(&raw[i]);
        b->d = static_cast<uint16_t>(0x2000 | (random_bits() & 0x83FF));
        if constexpr (std::is_same_v<Block, Q4_1> || std::is_same_v<Block, Q5_1>) b->m = 0xA400;
        if constexpr (std::is_same_v<Block, Q4_K> || std::is_same_v<Block, Q5_K>) b->dmin = 0x2400;
      }
    });
  }
  return raw;
}

bool same(const std::vector<float>& a, const std::vector<float>& b) {
  return memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

void codecs(int type, int64_t cols) {
  const Kernels &k = kernels(), &s = kernels_scalar;
  const auto raw = random_rows(type, 1, cols);
  const size_t n = static_cast<size_t>(cols);
  std::vector<float> a(n), b(n), ca(n), cb(n);
  k.decode(type, raw.data(), cols, a.data());
  s.decode(type, raw.data(), cols, b.data());
  check(same(a, b), "decode", type);
  k.cells(type, raw.data(), cols, 0.25f, ca.data());
  s.cells(type, raw.data(), cols, 0.25f, cb.data());
  check(same(ca, cb), "cells", type);
  for (int bits : {2, 4, 8}) {
    std::vector<uint8_t> plane(static_cast<size_t>(plane_bytes(bits, cols)));
    for (auto& p : plane) p = static_cast<uint8_t>(random_bits());
    k.add_plane(bits, plane.data(), ca.data(), cell_group(type), cols, a.data());
    s.add_plane(bits, plane.data(), ca.data(), cell_group(type), cols, b.data());
    check(same(a, b), "add_plane", type * 100 + bits);
  }
}

void tiles(int64_t n) {
  const Kernels &k = kernels(), &s = kernels_scalar;
  const int rows = 13, cols = 9;
  std::vector<float> w(static_cast<size_t>(rows * n)), x(static_cast<size_t>(cols * n));
  for (auto& v : w) v = random_float();
  for (auto& v : x) v = random_float();
  std::vector<float> a(rows * cols), b(rows * cols), alone(rows * cols);
  std::vector<const float*> xs;
  std::vector<float*> as, bs, ones;
  for (int c = 0; c < cols; ++c) {
    xs.push_back(&x[static_cast<size_t>(c * n)]);
    as.push_back(&a[static_cast<size_t>(c * rows)]);
    bs.push_back(&b[static_cast<size_t>(c * rows)]);
    ones.push_back(&alone[static_cast<size_t>(c * rows)]);
  }
  k.tile(w.data(), n, rows, n, xs.data(), cols, as.data());
  s.tile(w.data(), n, rows, n, xs.data(), cols, bs.data());
  for (int c = 0; c < cols; ++c) k.tile(w.data(), n, rows, n, &xs[c], 1, &ones[c]);
  check(same(a, alone), "a column alone", static_cast<int>(n));
  for (size_t i = 0; i < a.size(); ++i) {
    check(std::fabs(a[i] - b[i]) <= 1e-6f * static_cast<float>(n), "tile", static_cast<int>(n));
  }
}

// Integers of the scalar arm in this one's order.
std::vector<int16_t> ordered(const std::vector<int16_t>& v) {
  std::vector<int16_t> out(v.size());
  for (size_t i = 0; i < v.size(); ++i)
    out[i] = v[i / kGroup * kGroup + kernels().order[i % kGroup]];
  return out;
}

// The integer products of this arm against the scalar ones: the same bits.
void integers(int type, int bits, int span) {
  const Kernels &k = kernels(), &s = kernels_scalar;
  const int64_t n = 512, rows = 13, groups = n / kGroup;
  const int group = cell_group(type), L = k.lanes;
  const int id = type * 1000 + bits * 10 + span;
  const auto raw = random_rows(type, rows, n);
  std::vector<uint8_t> plane(static_cast<size_t>(rows * plane_bytes(bits, n)) + 1);
  for (auto& p : plane) p = static_cast<uint8_t>(random_bits());
  std::vector<int16_t> q(static_cast<size_t>(rows * n)), qs(q);
  std::vector<float> scale(static_cast<size_t>(16 * n / group)), offset(scale), scales(scale),
      offsets(scale);
  bool has_offset = false;
  with_format(type, [&](auto* f) { has_offset = std::remove_pointer_t<decltype(f)>::offset; });
  const Codes16 w{q.data(), n, scale.data(), offset.data(), has_offset, 16, group};
  const Codes16 ws{qs.data(), n, scales.data(), offsets.data(), has_offset, 16, group};
  const Rows from{
      type, raw.data(), row_bytes(type, n), bits, span, plane.data(), plane_bytes(bits, n), 64, 64};
  check(k.codes(from, rows, n, w), "codes", id);
  s.codes(from, rows, n, ws);
  for (int64_t r = 0; r < rows; ++r) {
    const uint8_t* p = &plane[static_cast<size_t>(r * plane_bytes(bits, n))];
    const uint8_t* row = &raw[static_cast<size_t>(r * row_bytes(type, n))];
    // scale * q + offset is the weight that `decode` and `add_plane` give.
    std::vector<float> w(static_cast<size_t>(n)), cell(static_cast<size_t>(n));
    s.decode(type, row, n, w.data());
    s.cells(type, row, n, 0.0f, cell.data());
    for (auto& c : cell) c = std::ldexp(c, span - bits);
    if (bits) s.add_plane(bits, p, cell.data(), group, n, w.data());
    for (int64_t j = 0; j < n; ++j) {
      const size_t at = static_cast<size_t>(j / group * 16 + r);
      const float v = scales[at] * qs[static_cast<size_t>(r * n + j)] + offsets[at];
      const float bound = is_table(type) ? 1.01f / (2 << kTableBits) : 2e-6f;  // of absmax <= 1
      check(std::fabs(v - w[static_cast<size_t>(j)]) <= bound, "codes against decode", id);
      check(std::abs(qs[static_cast<size_t>(r * n + j)]) < kCodeLimit, "a code too large", id);
    }
  }
  check(q == ordered(qs) && same(scale, scales) && same(offset, offsets), "codes differ", id);

  std::vector<float> x(static_cast<size_t>(L * n)), step(static_cast<size_t>(L * groups)),
      sum(step), steps(step), sums(step);
  for (auto& v : x)
    v = random_float() * std::ldexp(1.0f, static_cast<int>(random_bits() % 40) - 20);
  std::vector<int16_t> xq(x.size()), xqs(x.size());
  for (int64_t c = 0; c < L; ++c) {
    k.quantize(&x[static_cast<size_t>(c * n)], n, &xq[static_cast<size_t>(c * n)],
               &step[static_cast<size_t>(c * groups)], &sum[static_cast<size_t>(c * groups)]);
    s.quantize(&x[static_cast<size_t>(c * n)], n, &xqs[static_cast<size_t>(c * n)],
               &steps[static_cast<size_t>(c * groups)], &sums[static_cast<size_t>(c * groups)]);
  }
  check(xq == ordered(xqs) && same(step, steps) && same(sum, sums), "quantize differs", id);
  const int columns = L - 1;  // the last one is not there
  std::vector<int16_t> panel(static_cast<size_t>(L * n));
  k.interleave(xq.data(), n, columns, n, panel.data());
  std::vector<float> ps(static_cast<size_t>(L * groups)), pt(ps),
      out(static_cast<size_t>(rows * L));
  for (int64_t c = 0; c < columns; ++c)
    for (int64_t g = 0; g < groups; ++g) {
      ps[static_cast<size_t>(g * L + c)] = step[static_cast<size_t>(c * groups + g)];
      pt[static_cast<size_t>(g * L + c)] = sum[static_cast<size_t>(c * groups + g)];
    }
  k.panel(w, false, rows, n, panel.data(), ps.data(), pt.data(), out.data());
  for (int64_t c = 0; c < columns; ++c) {
    std::vector<float> own(rows), exact(rows), placed(rows + 3, 7.0f);
    const size_t at = static_cast<size_t>(c * groups);
    k.column(w, rows, n, &xq[static_cast<size_t>(c * n)], &step[at], &sum[at], own.data());
    s.column(ws, rows, n, &xqs[static_cast<size_t>(c * n)], &step[at], &sum[at], exact.data());
    check(same(own, exact), "column differs", id);
    std::fill(own.begin(), own.end(), 0.0f);
    if (is_table(type) && !bits &&
        k.table_column(from, rows, n, &xq[static_cast<size_t>(c * n)], &step[at], own.data())) {
      check(same(own, exact), "table_column differs", id);
    }
    std::vector<float> others(rows + 3);
    std::vector<float*> ys(static_cast<size_t>(c + 1), others.data());
    ys.back() = placed.data();
    k.unpanel(out.data(), rows, static_cast<int>(c + 1), ys.data(), 1);
    for (int64_t r = 0; r < rows; ++r) {
      check(out[static_cast<size_t>(r * L + c)] == exact[static_cast<size_t>(r)], "panel differs",
            id);
      check(placed[static_cast<size_t>(r + 1)] == exact[static_cast<size_t>(r)], "unpanel", id);
    }
    check(placed[0] == 7.0f && placed[rows + 1] == 7.0f, "unpanel outside", id);
  }
}

// Dense signs of a few rows: the panel's numbers.
void sign_columns(int64_t n, int rows, int columns) {
  const Kernels& k = kernels();
  const int64_t groups = n / kGroup;
  std::vector<float> x(n), scale(columns * groups), sum(groups), y(columns * kSignRows, 7.0f), z;
  std::vector<int16_t> q(columns * n), signs(rows * n);
  std::vector<int32_t> table(columns * 4 * n);
  std::vector<SignColumn> given;
  uint32_t at[kSignRows];
  for (int r = 0; r < kSignRows; ++r) at[r] = random_bits() % 5000;
  for (int c = 0; c < columns; ++c) {
    for (auto& v : x) v = random_float();
    k.quantize(x.data(), n, &q[c * n], &scale[c * groups], sum.data());
    k.sign_table(&q[c * n], n, &table[c * 4 * n]);
    given.push_back({&table[c * 4 * n], &scale[c * groups], &y[c * kSignRows]});
  }
  k.sign_columns(77, 5, at, rows, n, given.data(), columns, 0.03f);
  std::vector<uint32_t> words(sign_word_count(n));
  for (int r = 0; r < rows; ++r) {
    sign_words(77, at[r], 5, kStreamSign, n, words.data());
    k.signs(words.data(), n, &signs[r * n]);
  }
  std::vector<float> same_c(groups * 16, 0.03f);
  const Codes16 w{signs.data(), n, same_c.data(), same_c.data(), false, 16, kGroup};
  for (int c = 0; c < columns; ++c) {
    z.assign(rows, 0.0f);
    k.column(w, rows, n, &q[c * n], &scale[c * groups], sum.data(), z.data());
    for (int r = 0; r < rows; ++r) check(y[c * kSignRows + r] == z[r], "sign_columns", (int)n);
    if (rows < kSignRows) check(y[c * kSignRows + rows] == 7.0f, "sign_columns outside", rows);
  }
}

void extremes() {
  const Kernels& k = kernels();
  float x[kGroup] = {}, scale, sum;
  int16_t q[kGroup];
  for (float bad : {INFINITY, -INFINITY, NAN}) {
    x[3] = bad;
    k.quantize(x, kGroup, q, &scale, &sum);
    check(std::isnan(scale), "what is not finite must show", 0);
  }
  for (float v : {0.0f, 1e-42f, 1e-30f, 1.0f, 3e38f}) {
    x[3] = v;
    x[4] = -v / 3;
    k.quantize(x, kGroup, q, &scale, &sum);
    int16_t natural[kGroup];
    for (int i = 0; i < kGroup; ++i) natural[k.order[i]] = q[i];
    check(std::fabs(scale * natural[3] - v) <= v / 16384 + 1e-37f && std::isfinite(sum), "quantize",
          0);
    check(std::fabs(scale * natural[4] + v / 3) <= v / 16384 + 1e-37f, "quantize", 1);
  }
  std::vector<int16_t> a(64), b(64);
  uint32_t words[2] = {random_bits() * 77u, random_bits() * 91u};
  k.signs(words, 64, a.data());
  kernels_scalar.signs(words, 64, b.data());
  check(a == ordered(b) && a[0] * a[0] == 1, "signs", 0);
  const int L = k.lanes;
  std::vector<float> by(L), one(L * 9), two;
  std::vector<uint32_t> bits(L * 2);
  for (auto& v : by) v = random_float();
  for (auto& v : one) v = random_float();
  for (auto& v : bits) v = random_bits() * 513u;
  two = one;
  k.add_panel_signs(one.data(), 9, 27, bits.data(), by.data());
  for (int r = 0; r < 9; ++r)
    for (int c = 0; c < L; ++c) {
      const bool minus = bits[(27 + r) / 32 * L + c] >> ((27 + r) % 32) & 1;
      two[r * L + c] += minus ? -by[c] : by[c];
    }
  check(same(one, two), "add_panel_signs", 0);
}

void graph(int64_t n) {
  const Kernels &k = kernels(), &s = kernels_scalar;
  std::vector<float> x(static_cast<size_t>(n)), g(x), a(x), b(x);
  for (auto& v : x) v = 8 * random_float();
  for (auto& v : g) v = random_float();
  k.rms_norm(x.data(), n, 1e-5f, a.data());
  s.rms_norm(x.data(), n, 1e-5f, b.data());
  for (int64_t j = 0; j < n; ++j) check(std::fabs(a[j] - b[j]) <= 1e-6f, "rms_norm", (int)n);
  k.swiglu(x.data(), g.data(), n, a.data());
  s.swiglu(x.data(), g.data(), n, b.data());
  for (int64_t j = 0; j < n; ++j) check(std::fabs(a[j] - b[j]) <= 4e-6f, "swiglu", (int)n);
  std::vector<uint16_t> ha(static_cast<size_t>(n)), hb(ha);
  for (auto& v : x)
    v = random_float() * std::ldexp(1.0f, static_cast<int>(random_bits() % 48) - 28);
  x[0] = 65520.0f;
  k.to_half(x.data(), n, ha.data());
  s.to_half(x.data(), n, hb.data());
  check(ha == hb, "to_half", static_cast<int>(n));
}

// Attention against the scalar one; cells that nobody sees, and other heads, change no bit.
void attention(int heads, int64_t cells, int64_t dk, int64_t dv, float softcap, bool extras) {
  const int64_t room = (cells + 64 + 15) / 16 * 16;
  std::vector<uint16_t> kv(static_cast<size_t>((cells + 64) * (dk + dv))), mask(cells + 64);
  for (auto& v : kv) v = half_of(random_float());
  for (int64_t c = 0; c < cells + 64; ++c)
    mask[c] = c >= cells || c % 5 == 3 ? kMinusInfinity : half_of(extras ? -0.25f * (c % 3) : 0.0f);
  std::vector<float> q(static_cast<size_t>(heads * dk)), a(heads * dv), b(a), c(a),
      scores(heads * room);
  for (auto& v : q) v = 3 * random_float();
  std::vector<const float*> qs;
  std::vector<float> slope(heads), sink(heads);
  for (int h = 0; h < heads; ++h) {
    qs.push_back(&q[static_cast<size_t>(h * dk)]);
    slope[h] = 0.5f + h;
    sink[h] = 0.1f * h;
  }
  const auto run = [&](const Kernels& k, int first, int count, int64_t n, std::vector<float>& out) {
    std::vector<float*> outs;
    for (int h = 0; h < heads; ++h) outs.push_back(&out[static_cast<size_t>(h * dv)]);
    Attend t{};
    t.heads = count;
    t.cells = n;
    t.dk = dk;
    t.dv = dv;
    t.q = &qs[static_cast<size_t>(first)];
    t.k = kv.data();
    t.v = kv.data() + dk;
    t.k_stride = t.v_stride = dk + dv;
    t.mask = mask.data();
    t.scale = 0.3f;
    t.softcap = softcap;
    t.slope = extras ? &slope[static_cast<size_t>(first)] : nullptr;
    t.sink = extras ? &sink[static_cast<size_t>(first)] : nullptr;
    t.scores = scores.data();
    t.room = room;
    t.out = &outs[static_cast<size_t>(first)];
    k.attend(t);
  };
  run(kernels(), 0, heads, cells, a);
  run(kernels_scalar, 0, heads, cells, b);
  for (size_t i = 0; i < a.size(); ++i) check(std::fabs(a[i] - b[i]) <= 2e-5f, "attend", heads);
  run(kernels(), 0, heads, cells + 64, c);
  check(same(a, c), "unseen cells show in attention", heads);
  for (int h = 0; h < heads; ++h) run(kernels(), h, 1, cells, c);
  check(same(a, c), "other heads show in attention", heads);
}

struct Case {
  edgees_tensor t{};
  std::vector<uint8_t> raw, plane;
  std::vector<float> a, delta;
  std::vector<uint32_t> pool;
};

// views: 0 plain, 1 residual plane, 2 adapter
Case make(int type, int64_t rows, int64_t cols, int heads, int view) {
  Case c;
  c.raw = random_rows(type, rows, cols);
  c.t.type = type;
  c.t.heads = heads;
  c.t.rows = rows;
  c.t.cols = cols;
  c.t.row_stride = row_bytes(type, cols);
  c.t.id = 77;
  c.t.rho = 0.3f;
  c.t.cell = 0.075f;
  if (view == 1) {
    c.delta.resize(static_cast<size_t>(rows * cols));
    for (auto& v : c.delta) v = 0.02f * random_float();
    std::vector<int32_t> order;
    for (int64_t r = 0; r < rows; ++r)
      order.push_back(static_cast<int32_t>(canonical_row(r, rows, heads)));
    int64_t counts[9] = {};
    check(edgees_plane_count(type, c.raw.data(), rows, cols, c.delta.data(), 0.075f, counts) == 0,
          "plane_count", type);
    c.plane.resize(static_cast<size_t>(rows * plane_bytes(4, cols)));
    c.t.bits = 4;
    c.t.span = 1;
    check(edgees_plane_encode(type, c.raw.data(), rows, cols, c.delta.data(), order.data(), 5,
                              c.t.id, 4, 1, 0.075f, c.plane.data()) == 0,
          "plane_encode", type);
    if (!is_float(type)) {
      std::vector<uint8_t> moved(c.raw.size());
      const int code = edgees_lattice_encode(type, c.raw.data(), rows, cols, c.delta.data(),
                                             order.data(), 5, c.t.id, moved.data());
      check(code == (is_table(type) ? EDGEES_E_TYPE : 0), "lattice_encode", type);
    }
  } else if (view == 2) {
    c.t.factors = 5;
    c.a.resize(static_cast<size_t>(rows * 5));
    for (auto& v : c.a) v = 0.02f * random_float();
    c.pool.resize(static_cast<size_t>(5 * sign_word_count(cols)));
    for (int k = 0; k < 5; ++k)
      sign_words(9, 0, c.t.id, kStreamPool + static_cast<uint32_t>(k), cols,
                 &c.pool[static_cast<size_t>(k * sign_word_count(cols))]);
  }
  return c;
}

void link(Case& c) {
  c.t.base = c.raw.data();
  c.t.plane = c.plane.data();
  c.t.a = c.a.data();
  c.t.pool = c.pool.data();
}

void products(int type, int kind, int rank, int view, int heads, int64_t cols = 256) {
  const int64_t rows = heads ? 256 : 208, n = 37;
  Case c = make(type, rows, cols, heads, view);
  link(c);
  const edgees_noise_kind noise{kind, rank};
  const edgees_member members[4] = {{11, 0.1f, 3}, {12, -0.1f, 8}, {0, 0.0f, 0}, {13, 0.2f, 2}};
  std::vector<float> x(static_cast<size_t>(n * cols)), y(static_cast<size_t>(n * rows)), one(y);
  for (auto& v : x) v = random_float();
  std::vector<const float*> xs;
  std::vector<float*> ys, ones;
  std::vector<int32_t> owner;
  for (int64_t i = 0; i < n; ++i) {
    xs.push_back(&x[static_cast<size_t>(i * cols)]);
    ys.push_back(&y[static_cast<size_t>(i * rows)]);
    ones.push_back(&one[static_cast<size_t>(i * rows)]);
    owner.push_back(static_cast<int32_t>(i % 8 == 5 ? 3 : i * 7 % 3));  // the last one has few
  }
  const int id = type * 1000 + kind * 100 + view * 10 + heads;
  for (int threads : {1, 3}) {
    edgees_set_threads(threads);
    check(edgees_product(&c.t, &noise, members, owner.data(), n, xs.data(), ys.data()) == 0,
          "product", id);
    for (int64_t i = 0; i < n; ++i)
      edgees_product(&c.t, &noise, members, &owner[static_cast<size_t>(i)], 1,
                     &xs[static_cast<size_t>(i)], &ones[static_cast<size_t>(i)]);
    check(same(y, one), "company shows in a product", id);
  }
  // edgees_row gives the member's matrix itself: its product must be the same up to rounding.
  std::vector<float> w(static_cast<size_t>(cols));
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t i = 0; i < 3; ++i) {
      check(edgees_row(&c.t, &noise, &members[owner[static_cast<size_t>(i)]], r, w.data()) == 0,
            "row", id);
      double sum = 0, size = 0;
      for (int64_t j = 0; j < cols; ++j) {
        const double term = static_cast<double>(w[static_cast<size_t>(j)]) * xs[i][j];
        sum += term;
        size += std::fabs(term);
      }
      // Activations are rounded to 2^-14 of the largest of their group, tables to 2^-12 of absmax.
      const double bound = is_table(type) ? 3e-4 : 3e-5;
      check(std::fabs(sum - ys[i][r]) <= bound * (size + 1), "row against product", id);
    }
}

// Codes with their absmax apart: the bits of the same codes in blocks; any shape.
void apart(int type, int64_t rows, int64_t cols, int bits, int64_t n) {
  const int64_t size = rows * cols;
  std::vector<uint8_t> packed(static_cast<size_t>((size + 1) / 2)), raw;
  std::vector<float> absmax(static_cast<size_t>((size + 63) / 64));
  for (auto& b : packed) b = static_cast<uint8_t>(random_bits());
  for (auto& v : absmax) v = std::fabs(random_float());
  std::vector<uint8_t> plane(static_cast<size_t>(rows * plane_bytes(4, cols)));
  for (auto& b : plane) b = static_cast<uint8_t>(random_bits());
  edgees_tensor t{};
  t.type = type;
  t.rows = rows;
  t.cols = cols;
  t.base = packed.data();
  t.absmax = absmax.data();
  t.id = 5;
  t.rho = 0.3f;
  t.bits = bits;
  t.plane = bits ? plane.data() : nullptr;
  const edgees_noise_kind noise{EDGEES_NOISE_LOWRANK, 1};
  const uint64_t keys[2] = {11, 0};
  const float amplitudes[2] = {0.1f, 0.0f};
  const uint32_t slots[2] = {3, 0};
  const edgees_members members{2, keys, amplitudes, slots};
  std::vector<float> x(static_cast<size_t>(n * cols)), y(static_cast<size_t>(n * rows)), z(y),
      w(static_cast<size_t>(size));
  std::vector<int32_t> owner;
  std::vector<int64_t> all;
  for (auto& v : x) v = random_float();
  for (int64_t c = 0; c < n; ++c) owner.push_back(static_cast<int32_t>(c % 2));
  const int id = static_cast<int>(rows * 10000 + cols);
  check(edgees_product_rows(&t, &noise, &members, owner.data(), n, x.data(), cols, y.data(),
                            rows) == 0,
        "product apart", id);
  const std::vector<int32_t> centre(static_cast<size_t>(rows), 1);
  for (int64_t r = 0; r < rows; ++r) all.push_back(r);
  check(edgees_rows(&t, &noise, &members, centre.data(), rows, all.data(), w.data()) == 0,
        "rows apart", id);
  all[0] = rows;
  check(edgees_rows(&t, &noise, &members, centre.data(), 1, all.data(), w.data() + size - cols) ==
            EDGEES_E_ARGUMENT,
        "a row too far", id);
  const std::vector<int32_t> nobody(static_cast<size_t>(rows), 2);
  check(edgees_rows(&t, &noise, &members, nobody.data(), 1, all.data(), w.data() + size - cols) ==
            EDGEES_E_COLUMNS,
        "a row of nobody", id);
  if (!bits) {
    for (int64_t i = 0; i < size; ++i) {
      const int code = i % 2 ? packed[i / 2] & 15 : packed[i / 2] >> 4;
      check(w[static_cast<size_t>(i)] == table_of(type)[code] * absmax[i / 64], "codes apart", id);
    }
    for (int64_t c = 1; c < n; c += 2)  // the centre's columns
      for (int64_t r = 0; r < rows; ++r) {
        double sum = 0, most = 1;
        for (int64_t j = 0; j < cols; ++j) {
          const double term = w[static_cast<size_t>(r * cols + j)] * x[c * cols + j];
          sum += term;
          most += std::fabs(term);
        }
        check(std::fabs(sum - y[c * rows + r]) <= 3e-4 * most, "product of odd shape", id);
      }
  }
  if (cols % 64) {
    t.bits = 4;
    t.plane = plane.data();
    check(edgees_product_rows(&t, &noise, &members, owner.data(), n, x.data(), cols, y.data(),
                              rows) == EDGEES_E_ARGUMENT,
          "a plane beside partial blocks", id);
    return;
  }
  for (int64_t i = 0; i < size; i += 64) {
    const uint8_t* m = reinterpret_cast<const uint8_t*>(&absmax[static_cast<size_t>(i / 64)]);
    raw.insert(raw.end(), m, m + 4);
    raw.insert(raw.end(), &packed[i / 2], &packed[i / 2] + 32);
  }
  t.base = raw.data();
  t.row_stride = row_bytes(type, cols);
  t.absmax = nullptr;
  check(edgees_product_rows(&t, &noise, &members, owner.data(), n, x.data(), cols, z.data(),
                            rows) == 0,
        "product in blocks", id);
  check(same(y, z), "blocks and codes apart differ", id);
}

}  // namespace

int main() {
  const char* isa = edgees_isa();
  for (int type : kTypes) codecs(type, 768);
  for (int64_t cols : {1, 31, 33, 77}) codecs(kTypeF16, cols);
  for (int64_t n : {1, 7, 16, 33, 257}) tiles(n);
  for (int type : kTypes) {
    if (is_float(type)) continue;
    for (int bits : {0, 2, 4}) integers(type, bits, 0);
    integers(type, 4, is_table(type) ? 2 : 5);
    integers(type, 4, is_table(type) ? 3 : 7);
  }
  for (int type : {kTypeQ4_1, kTypeNF4}) integers(type, 8, 0);
  for (int64_t n : {32, 96, 128, 576, 1088})
    for (int rows : {1, 5, 16})
      for (int columns = 1; columns <= kSignColumns; ++columns) sign_columns(n, rows, columns);
  extremes();
  for (int64_t n : {1, 15, 64, 577}) graph(n);
  attention(3, 77, 64, 64, 0.0f, false);
  attention(1, 1, 64, 64, 0.0f, false);
  attention(8, 40, 128, 128, 0.0f, true);
  attention(5, 33, 40, 36, 5.0f, true);
  for (int type : kTypes)
    for (int view = 0; view < 3; ++view) products(type, EDGEES_NOISE_LOWRANK, 2, view, 4);
  for (int view = 0; view < 3; ++view) products(kTypeQ4_1, EDGEES_NOISE_LOWRANK, 1, view, 0);
  for (int view = 0; view < 2; ++view) products(kTypeQ4_1, EDGEES_NOISE_SIGN, 1, view, 4);
  for (int view = 0; view < 2; ++view) products(kTypeQ6_K, EDGEES_NOISE_NORMAL, 1, view, 0);
  for (int type : {kTypeQ4_1, kTypeQ4_K})  // rows longer than a piece
    for (int kind : {EDGEES_NOISE_LOWRANK, EDGEES_NOISE_SIGN}) products(type, kind, 1, 1, 4, 1024);
  for (int type : {kTypeNF4, kTypeFP4})
    for (int64_t n : {1, 37}) {
      apart(type, 96, 1024, 4, n);
      apart(type, 70, 128, 0, n);
      apart(type, 63, 65, 0, n);
      apart(type, 64, 172, 0, n);
    }
  if (failures == 0) printf("product_test: ok (%s)\n", isa);
  return failures != 0;
}
