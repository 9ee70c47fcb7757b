// The operations of a transformer that touch no tuned weight, on ggml's tensors. With them a whole
// graph stays in our backend: no splits, no second pool of threads, attention over a sequence's own
// cells only, and every token's result independent of what else is in the batch.
#pragma once
#include "ggml_abi.h"

namespace edgees {

// Finds the operations' numbers by name, 0..last. Null, or the name of one that ggml lacks.
const char* find_ops(const char* (*op_name)(int), int last);

// Whether `run_op` does this operation, all of it.
bool can_run(const ggml::Tensor* node);
void run_op(ggml::Tensor* node);

// What was kept between operations of one graph (rotations, visible cells) is out of date.
void forget_ops();

}  // namespace edgees
