// Products of one tuned tensor with the columns of many members.
#pragma once
#include <cstdint>
#include <vector>

#include "api.h"

namespace edgees {

// The inputs of a product, as integers too; kept while several tensors read the same columns.
class Columns {
 public:
  // n columns of `cols` numbers each, which stay where they are.
  void set(const float* const* x, int64_t n, int64_t cols);
  int64_t n = 0, cols = 0;
  std::vector<const float*> x;

 private:
  friend class Product;
  bool integers_ = false;  // the rest is filled
  std::vector<int16_t> q_, panels_;
  std::vector<float> scale_, sum_, panel_scale_, panel_sum_;
};

// y[c][row] for each column c, which belongs to members[owner[c]]. 0 or EDGEES_E_.
int product(const edgees_tensor& t, const edgees_noise_kind& noise, const edgees_member* members,
            const int32_t* owner, Columns& columns, float* const* y);

}  // namespace edgees
