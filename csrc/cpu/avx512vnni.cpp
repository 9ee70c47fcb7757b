// The AVX-512 arm of CPUs that have VNNI: the same source, with one instruction for its dots.
#define EDGEES_ARM_VNNI
#include "avx512.cpp"
