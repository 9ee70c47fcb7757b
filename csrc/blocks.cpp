#include "blocks.h"

#include <cmath>
#include <vector>

#include "api.h"
#include "kernels.h"
#include "parallel.h"

namespace edgees {

int64_t row_bytes(int type, int64_t cols) {
  if (cols <= 0) return EDGEES_E_ARGUMENT;
  int64_t bytes = EDGEES_E_TYPE;
  if (type == kTypeF32) return cols * 4;
  if (is_float(type)) return cols * 2;
  if (is_table(type)) {
    return cols % Table4::weights ? static_cast<int64_t>(EDGEES_E_ARGUMENT)
                                  : cols / Table4::weights * static_cast<int64_t>(sizeof(Table4));
  }
  with_format(type, [&](auto* block) {
    using Block = std::remove_pointer_t<decltype(block)>;
    bytes = cols % Block::weights ? static_cast<int64_t>(EDGEES_E_ARGUMENT)
                                  : cols / Block::weights * static_cast<int64_t>(sizeof(Block));
  });
  return bytes;
}

int cell_group(int type) {
  int group = is_float(type) ? kFloatGroup : is_table(type) ? Table4::group : EDGEES_E_TYPE;
  with_format(type, [&](auto* block) { group = std::remove_pointer_t<decltype(block)>::group; });
  return group;
}

void decode_row(int type, const void* base, int64_t cols, const Plane& plane, const uint8_t* codes,
                float* scratch, float* out) {
  const Kernels& k = kernels();
  k.decode(type, base, cols, out);
  if (!plane.bits) return;
  const int group = cell_group(type);
  const int64_t groups = (cols + group - 1) / group;
  const float part = std::ldexp(1.0f, plane.span - plane.bits);
  k.cells(type, base, cols, plane.float_cell, scratch);
  for (int64_t g = 0; g < groups; ++g) scratch[g] *= part;
  k.add_plane(plane.bits, codes, scratch, group, cols, out);
}

}  // namespace edgees

using namespace edgees;

extern "C" {

int64_t edgees_row_bytes(int type, int64_t cols) { return row_bytes(type, cols); }

int edgees_cell_group(int type) { return cell_group(type); }

int edgees_decode(int type, const void* rows_data, int64_t rows, int64_t cols, float* out) {
  const int64_t width = row_bytes(type, cols);
  if (width < 0) return static_cast<int>(width);
  each_row(rows, cols, [&](int64_t r) {
    kernels().decode(type, static_cast<const uint8_t*>(rows_data) + r * width, cols,
                     out + r * cols);
  });
  return 0;
}

int edgees_cells(int type, const void* rows_data, int64_t rows, int64_t cols, float cell_rho,
                 float* out) {
  const int64_t width = row_bytes(type, cols);
  if (width < 0) return static_cast<int>(width);
  const int group = cell_group(type);
  const int64_t groups = (cols + group - 1) / group;
  each_row(rows, cols, [&](int64_t r) {
    kernels().cells(type, static_cast<const uint8_t*>(rows_data) + r * width, cols, cell_rho,
                    out + r * groups);
  });
  return 0;
}

int edgees_effective(int type, const void* base, int64_t rows, int64_t cols, int bits,
                     const uint8_t* plane, int span, float cell_rho, float* out) {
  const int64_t width = row_bytes(type, cols);
  if (width < 0) return static_cast<int>(width);
  if (bits != 0 && bits != 2 && bits != 4 && bits != 8) return EDGEES_E_ARGUMENT;
  if (bits && (!plane || span < 0 || span > 8)) return EDGEES_E_ARGUMENT;
  const Plane p{bits, span, cell_rho};
  const int64_t stride = plane_bytes(bits, cols);
  each_row(rows, cols, [&](int64_t r) {
    static thread_local std::vector<float> scratch;
    scratch.resize(static_cast<size_t>(cols / 16 + 1));
    decode_row(type, static_cast<const uint8_t*>(base) + r * width, cols, p, plane + r * stride,
               scratch.data(), out + r * cols);
  });
  return 0;
}
}
