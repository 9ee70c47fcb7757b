// The CUDA kernels on the host (cuda/emulate.h), in buffers of exactly their size so that
// sanitizers see what goes past them: against the compiled core bit for bit, and products against
// sums of doubles. tests/test_cuda.py has more shapes. Exit code 0: all as they should be.
#define EDGEES_EMULATE
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "../api.h"
#include "../cuda/kernels.cu"

using namespace edgees;

namespace {

int failures = 0;
void check(bool ok, const char* what, int64_t detail) {
  if (ok) return;
  ++failures;
  fprintf(stderr, "FAIL %s (%lld)\n", what, static_cast<long long>(detail));
}

uint32_t state = 12345;
uint32_t random_bits() {
  state = state * 1664525u + 1013904223u;
  return state >> 8;
}
float random_float() { return static_cast<float>(random_bits() & 0xFFFF) / 32768.0f - 1.0f; }

template <class Argument>
void launch(const std::string& name, dim3 grid, dim3 block, const Argument& argument,
            uint64_t seed) {
  const unsigned g[3] = {grid.x, grid.y, grid.z}, b[3] = {block.x, block.y, block.z};
  check(edgees_emulate(name.c_str(), g, b, &argument, sizeof argument, seed) == 0, name.c_str(), 0);
}

constexpr uint32_t kId = 0xC0FFEE;
constexpr float kRho = 0.05f;
const uint64_t kKeys[3] = {0x123456789ABCDEFull, 77, ~0ull};
const float kAmplitudes[3] = {0.25f, 0.0f, -0.125f};
const uint32_t kSlots[3] = {3, 1000000007u, 0xFFFFFFFFu};

// A matrix of any type in memory of its exact size.
struct Matrix {
  Weight w{};
  std::vector<uint8_t> base, plane, quantised;
  std::vector<float> absmax, absmax2, code, full;

  Matrix(int type, int64_t rows, int64_t cols, int bits, bool nested) {
    const int64_t n = rows * cols, blocks = (n + 63) / 64;
    w.rows = rows, w.cols = cols, w.type = type, w.bits = bits;
    w.cell = 0.0125f, w.part = std::ldexp(1.0f, 2 - bits);
    w.whole = cols % 32 == 0;
    const bool coded = type >= kNF4Type;
    base.resize(static_cast<size_t>(coded ? (n + 1) / 2 : type == kF32 ? 4 * n : 2 * n));
    for (auto& b : base) b = static_cast<uint8_t>(random_bits());
    for (int64_t i = 0; i < n && !coded; ++i) {
      const float v = random_float();
      const uint16_t h = static_cast<uint16_t>(type == kF16 ? to_half(v) : to_brain(v));
      if (type == kF32) {
        memcpy(&base[static_cast<size_t>(4 * i)], &v, 4);
      } else {
        memcpy(&base[static_cast<size_t>(2 * i)], &h, 2);
      }
    }
    for (int64_t i = 0; i < blocks; ++i) {
      quantised.push_back(static_cast<uint8_t>(random_bits()));
      absmax.push_back(std::fabs(random_float()));
    }
    for (int64_t i = 0; i < (blocks + 255) / 256; ++i) absmax2.push_back(random_float());
    for (int i = 0; i < 256; ++i) code.push_back(random_float());
    w.offset = 0.5f;
    for (int64_t i = 0; i < blocks && nested; ++i) {
      const float v =
          code[quantised[static_cast<size_t>(i)]] * absmax2[static_cast<size_t>(i / 256)];
      absmax[static_cast<size_t>(i)] = v + w.offset;
    }
    if (bits) plane.resize(static_cast<size_t>(rows * plane_bytes(bits, cols)));
    for (auto& p : plane) p = static_cast<uint8_t>(random_bits());
    w.base = base.data(), w.plane = plane.data();
    w.quantised = quantised.data(), w.code = code.data(), w.absmax2 = absmax2.data();
    w.absmax = nested ? nullptr : absmax.data();
    decode();
  }

  // What csrc/blocks.h says the weights are.
  void decode() {
    for (int64_t r = 0; r < w.rows; ++r)
      for (int64_t c = 0; c < w.cols; ++c) {
        const size_t i = static_cast<size_t>(r * w.cols + c);
        float v, cell = w.cell;
        if (w.type >= kNF4Type) {
          const int both = base[i / 2], at = i % 2 ? both & 15 : both >> 4;
          v = table_of(w.type)[at] * absmax[i / 64];
          cell = std::fabs(absmax[i / 64]) * 0.125f;
        } else {
          v = load(w.base, static_cast<int64_t>(i), w.type);
        }
        if (w.bits) {
          uint8_t q[32];
          const int64_t at = r * plane_bytes(w.bits, w.cols) + c / 32 * 4 * w.bits;
          unpack_plane(w.bits, &plane[static_cast<size_t>(at)], q);
          v += cell * w.part * static_cast<float>(q[c % 32] - (1 << (w.bits - 1)));
        }
        full.push_back(v);
      }
  }
};

struct Call {
  int64_t n;
  int x_type, kind, rank, factors;
  std::vector<int32_t> owner;
  std::vector<uint8_t> x, y;
  std::vector<float> dots, a;
  std::vector<uint32_t> pool;
  std::vector<double> values;  // of x

  Call(const Matrix& m, int64_t n, int x_type, int kind, int rank, int factors)
      : n(n), x_type(x_type), kind(kind), rank(rank), factors(factors) {
    const int64_t cols = m.w.cols, size = x_type == kF32 ? 4 : 2;
    for (int64_t i = 0; i < n; ++i) owner.push_back(static_cast<int32_t>(random_bits() % 3));
    x.resize(static_cast<size_t>(n * cols * size));
    y.resize(static_cast<size_t>(n * m.w.rows * size));
    for (int64_t i = 0; i < n * cols; ++i) {
      store(x.data(), i, x_type, random_float());
      values.push_back(load(x.data(), i, x_type));
    }
    dots.resize(static_cast<size_t>(n * (factors ? factors : rank)));
    for (int64_t i = 0; i < m.w.rows * factors; ++i) a.push_back(0.1f * random_float());
    for (int64_t i = 0; i < factors * sign_word_count(cols); ++i)
      pool.push_back(random_bits() * 257);
  }

  Noise noise() const {
    Noise e{};
    e.rho = kRho, e.tensor = kId, e.kind = kind < 0 ? kLowrank : kind, e.rank = rank;
    e.scale = noise_scale(e.kind, rank, false);
    if (kind >= 0)
      e.key = kKeys, e.amplitude = kAmplitudes, e.slot = kSlots, e.owner = owner.data();
    e.factors = factors, e.a = a.data(), e.pool = pool.data();
    return e;
  }

  Product product(const Matrix& m) {
    Product p{};
    p.w = m.w, p.e = noise(), p.x = x.data(), p.y = y.data(), p.dots = dots.data();
    p.n = n, p.x_stride = m.w.cols, p.y_stride = m.w.rows, p.x_type = x_type;
    return p;
  }
};

// As edgees/cuda.py launches it.
std::string run(const Matrix& m, Call& call, uint64_t seed) {
  const Product p = call.product(m);
  const unsigned n = static_cast<unsigned>(call.n), rows = static_cast<unsigned>(m.w.rows);
  const bool dense = call.kind >= 0 && call.kind != kLowrank;
  const int width = call.factors ? call.factors : call.kind == kLowrank ? call.rank : 0;
  if (width) launch("sign_dots", {n, static_cast<unsigned>(width), 1}, {64, 1, 1}, p, seed);
  if (n > 16) {
    const unsigned columns = n <= 64 || call.x_type == kF32 ? 64 : 128;
    const char* type = call.x_type == kF32 ? "f32" : call.x_type == kF16 ? "f16" : "bf16";
    const std::string name = std::string("tile_") + type + "_" + std::to_string(columns);
    launch(name, {(rows + 63) / 64, (n + columns - 1) / columns, 1}, {256, 1, 1}, p, seed);
    return name;
  }
  if (!m.w.whole) {
    launch("gemv_any_16", {(rows + 3) / 4, 1, 1}, {32, 4, 1}, p, seed);
    return "gemv_any_16";
  }
  const unsigned columns = call.kind == kNormal ? 4 : n == 1 ? 1 : n <= 4 ? 4 : dense ? 8 : 16;
  const unsigned steps = static_cast<unsigned>((m.w.cols + 1023) / 1024);
  const unsigned groups = steps > 1 ? 2 : 4;
  const std::string name = std::string(m.w.type >= kNF4Type ? "gemv_codes_" : "gemv_floats_") +
                           (!dense               ? "plain_"
                            : call.kind == kSign ? "sign_"
                                                 : "normal_") +
                           std::to_string(columns);
  launch(name, {(rows + 4 * groups - 1) / (4 * groups), (n + columns - 1) / columns, 1},
         {32, groups, steps}, p, seed);
  return name;
}

void products(int type, int64_t rows, int64_t cols, int bits, bool nested, int64_t n, int x_type,
              int kind, int rank, int factors) {
  const Matrix m(type, rows, cols, bits, nested);
  Call call(m, n, x_type, kind, rank, factors);
  const std::string name = run(m, call, 0);
  const std::vector<uint8_t> first = call.y;
  run(m, call, 99);
  check(first == call.y, ("another order of threads: " + name).c_str(), cols);

  const double round = x_type == kF32 ? 0 : x_type == kF16 ? 0x1p-11 : 0x1p-8;
  for (int64_t c = 0; c < n; ++c) {
    const int32_t o = call.owner[static_cast<size_t>(c)];
    std::vector<float> eps(static_cast<size_t>(rows * cols));
    if (kind >= 0 && !factors) {
      edgees_eps(kind, rank, 0, kKeys[o], kId, 0, rows, cols, eps.data());
    }
    std::vector<float> left(static_cast<size_t>(rank * rows));
    for (int k = 0; k < rank; ++k) {
      edgees_sign_vector(kKeys[o], kId, kStreamLeft + static_cast<uint32_t>(k), rows,
                         &left[static_cast<size_t>(k * rows)]);
    }
    const double strong = static_cast<double>(kAmplitudes[o]) * kRho;
    for (int64_t r = 0; r < rows; ++r) {
      double sum = 0, size = 0;
      for (int64_t j = 0; j < cols; ++j) {
        const size_t i = static_cast<size_t>(r * cols + j);
        const double x = call.values[static_cast<size_t>(c * cols + j)];
        double w = m.full[i] + (kind >= 0 ? strong * eps[i] : 0), more = 0;
        for (int f = 0; f < factors; ++f) {
          const bool minus =
              sign_bit(&call.pool[static_cast<size_t>(f * sign_word_count(cols))], j);
          double v = call.a[static_cast<size_t>(r * factors + f)];
          for (int k = 0; k < rank && kind >= 0; ++k) {
            if ((static_cast<uint64_t>(kSlots[o]) * rank + k) % factors ==
                static_cast<uint64_t>(f)) {
              v += strong / std::sqrt(rank) * left[static_cast<size_t>(k * rows + r)];
            }
          }
          more += std::fabs(v);
          w += minus ? -v : v;
        }
        sum += w * x;
        size += (std::fabs(w) + more) * std::fabs(x);
      }
      const double got = load(call.y.data(), c * rows + r, x_type);
      const double bound =
          size * (static_cast<double>(cols + 40) * 0x1p-24 + (n > 16 ? round : 0)) +
          std::fabs(sum) * round + 1e-6;
      check(std::fabs(got - sum) <= bound, name.c_str(), r * 1000 + c);
    }
  }
}

// A row and its bits against edgees_row, a vector against edgees_vector.
void lookups(int type, int64_t rows, int64_t cols, int kind, int factors) {
  const Matrix m(type, rows, cols, 0, false);
  Call call(m, 3, kF32, kind, 2, factors);
  const std::vector<int64_t> index = {rows - 1, 0, rows / 2};
  std::vector<float> out(static_cast<size_t>(3 * cols)), want(static_cast<size_t>(cols));
  Lookup p{};
  p.w = m.w, p.e = call.noise(), p.index = index.data(), p.out = out.data(), p.n = 3;
  launch("row_lookup", {3, static_cast<unsigned>((cols + 255) / 256), 1}, {256, 1, 1}, p, 7);
  edgees_tensor t{};
  t.rows = rows, t.cols = cols, t.base = m.full.data(), t.row_stride = 4 * cols;
  t.id = kId, t.rho = kRho, t.factors = factors, t.a = call.a.data(), t.pool = call.pool.data();
  for (size_t i = 0; i < 3; ++i) {
    const int32_t o = call.owner[i];
    const edgees_member member{kKeys[o], kind < 0 ? 0.0f : kAmplitudes[o], kSlots[o]};
    const edgees_noise_kind noise{kind < 0 ? kLowrank : kind, 2};
    edgees_row(&t, &noise, &member, index[i], want.data());
    check(memcmp(want.data(), &out[i * static_cast<size_t>(cols)], want.size() * 4) == 0, "a row",
          static_cast<int64_t>(i));
  }
  if (factors) return;
  const std::vector<float> delta(m.full.begin(), m.full.begin() + cols);
  Vector v{};
  v.base = m.full.data(), v.delta = delta.data(), v.e = call.noise(), v.out = out.data();
  v.e.scale = noise_scale(v.e.kind, 2, true), v.n = 3, v.cols = cols;
  launch("vector_of", {3, static_cast<unsigned>((cols + 255) / 256), 1}, {256, 1, 1}, v, 7);
  t.rows = 1, t.delta = delta.data();
  for (size_t i = 0; i < 3; ++i) {
    const int32_t o = call.owner[i];
    const edgees_member member{kKeys[o], kind < 0 ? 0.0f : kAmplitudes[o], 0};
    const edgees_noise_kind noise{kind < 0 ? kLowrank : kind, 2};
    edgees_vector(&t, &noise, &member, want.data());
    check(memcmp(want.data(), &out[i * static_cast<size_t>(cols)], want.size() * 4) == 0,
          "a vector", static_cast<int64_t>(i));
  }
}

void updates(int kind, int rank, int64_t rows, int64_t cols, int pairs) {
  std::vector<uint64_t> keys;
  std::vector<uint32_t> slots;
  std::vector<float> coefs, got(static_cast<size_t>(rows * cols));
  for (int p = 0; p < pairs; ++p) {
    keys.push_back(edgees_key(5, 1, static_cast<uint32_t>(p)));
    slots.push_back(random_bits() * 251);
    coefs.push_back(random_float());
  }
  for (auto& v : got) v = random_float();
  std::vector<float> want = got, a = got, b = got;
  Delta p{
      got.data(), rows, cols, 129, keys.data(), coefs.data(), 0.75f, noise_scale(kind, rank, false),
      pairs,      kind, rank, 0,   kId};
  launch("delta_apply",
         {static_cast<unsigned>((cols + 1023) / 1024), static_cast<unsigned>(rows), 1}, {32, 8, 1},
         p, 5);
  edgees_delta_apply(want.data(), rows, cols, 129, kId, kind, rank, 0, pairs, keys.data(),
                     coefs.data(), 0.75f);
  check(got == want, "delta_apply", cols);
  const Factors f{a.data(),
                  rows,
                  keys.data(),
                  slots.data(),
                  coefs.data(),
                  0.75f,
                  noise_scale(kLowrank, rank, false),
                  static_cast<int32_t>(cols),
                  pairs,
                  rank,
                  kId};
  launch("factors_apply", {static_cast<unsigned>((rows * cols + 255) / 256), 1, 1}, {256, 1, 1}, f,
         5);
  edgees_factors_apply(b.data(), rows, cols, kId, rank, pairs, keys.data(), slots.data(),
                       coefs.data(), 0.75f);
  check(a == b, "factors_apply", cols);
}

void planes(int type, int64_t rows, int64_t cols, int bits) {
  Matrix m(type, rows, cols, 0, false);
  std::vector<float> delta(static_cast<size_t>(rows * cols));
  for (auto& d : delta) d = 0.2f * random_float();
  const size_t size = static_cast<size_t>(rows * plane_bytes(bits, cols));
  std::vector<uint8_t> got(size), want(size), raw = m.base;
  std::vector<int32_t> order;
  for (int32_t r = 0; r < rows; ++r) order.push_back(r);
  if (type >= kNF4Type) {
    raw.clear();
    for (size_t i = 0; i < m.absmax.size(); ++i) {
      const uint8_t* d = reinterpret_cast<const uint8_t*>(&m.absmax[i]);
      raw.insert(raw.end(), d, d + 4);
      raw.insert(raw.end(), m.base.begin() + 32 * static_cast<int64_t>(i),
                 m.base.begin() + 32 * static_cast<int64_t>(i + 1));
    }
  }
  Rounding p{m.w, delta.data(), got.data(), 4711, rows, 0, kId, bits};
  p.w.part = std::ldexp(1.0f, 1 - bits);
  launch("plane_encode", {static_cast<unsigned>((rows * ((cols + 31) / 32) + 255) / 256), 1, 1},
         {256, 1, 1}, p, 5);
  edgees_plane_encode(type, raw.data(), rows, cols, delta.data(), order.data(), 4711, kId, bits, 1,
                      m.w.cell, want.data());
  check(got == want, "plane_encode", type * 10 + bits);
}

void tables() {
  for (int i = 0; i < 16; ++i) {
    check(memcmp(&kTables[0][i], &kNF4[i], 4) == 0, "NF4", i);
    check(memcmp(&kTables[1][i], &kFP4[i], 4) == 0, "FP4", i);
  }
  check(memcmp(kQuantiles.at, kNormalTable, sizeof kNormalTable) == 0, "quantiles", 0);
  for (uint32_t h = 0; h < 1 << 16; ++h) {
    const float v = from_brain(h);
    check(std::isnan(v) ? std::isnan(from_brain(to_brain(v))) : to_brain(v) == h, "bfloat16", h);
  }
  check(to_brain(1.00390625f) == 0x3F80 && to_brain(1.01171875f) == 0x3F82, "ties to even", 0);
}

}  // namespace

int main() {
#if defined(__SANITIZE_THREAD__)
  puts("cuda: one thread only, nothing for this sanitizer");
  return 0;
#endif
  const char* isa = getenv("EDGEES_ISA");
  const std::string best = std::string(edgees_isas()).substr(0, strcspn(edgees_isas(), " "));
  if (isa && *isa && best != isa) {  // other tests hold the arms to each other
    puts("cuda: on the best arm only");
    return 0;
  }
  tables();
  for (int kind : {-1, kSign, kLowrank, kNormal}) {
    products(kNF4Type, 6, 96, 0, true, 1, kBF16, kind, 2, 0);
    products(kFP4Type, 5, 1056, 0, false, 3, kF32, kind, 1, 0);
    products(kNF4Type, 9, 128, 4, true, 9, kF16, kind, 3, 0);
    products(kBF16, 3, 160, 2, false, 16, kBF16, kind, 1, 0);
    products(kF32, 2, 32, 0, false, 2, kF32, kind, 1, 0);
    products(kNF4Type, 63, 65, 0, true, 5, kBF16, kind, 1, 0);
    products(kF16, 3, 33, 8, false, 2, kF32, kind, 1, 0);
    products(kNF4Type, 66, 192, 8, false, 17, kBF16, kind, 2, 0);
    products(kFP4Type, 63, 65, 0, true, 20, kF16, kind, 1, 0);
    products(kNF4Type, 5, 96, 0, false, 65, kBF16, kind, 1, 0);
    products(kF16, 5, 70, 0, false, 65, kF16, kind, 1, 0);
    products(kBF16, 7, 97, 4, false, 18, kF32, kind, 1, 0);
    for (int type : {kNF4Type, kBF16}) lookups(type, 5, 300, kind, 0);
  }
  for (int kind : {-1, kLowrank}) {
    products(kNF4Type, 5, 96, 0, true, 2, kF32, kind, 2, 5);
    products(kNF4Type, 66, 65, 0, true, 17, kBF16, kind, 2, 5);
    lookups(kNF4Type, 7, 130, kind, 5);
  }
  for (int kind : {kSign, kLowrank, kNormal}) {
    updates(kind, 1, 3, 1, 2);
    updates(kind, 3, 2, 1030, 35);
    updates(kind, 1, 4, 33, 0);
  }
  for (int bits : {2, 4, 8}) {
    for (int type : {kNF4Type, kFP4Type, kF32, kBF16}) planes(type, 3, 128, bits);
    planes(kF16, 3, 45, bits);
  }
  printf("cuda: %s\n", failures ? "FAILED" : "ok");
  return failures != 0;
}
