// The AVX2 arm of CPUs that have AVX-VNNI (laptops without AVX-512): the same source, with one
// instruction for its dots.
#define EDGEES_ARM_VNNI
#include "avx2.cpp"
