// Products of a few rows with a transposed matrix, as in generation; part of cpu/kernels.cpp, compiled for each
// instruction set.
//
// With so few rows, packing the matrix, as in products.h, takes longer than multiplying, so it is read in place, four
// of its rows at a time, by all rows of a while they are in the caches. Each element of the result is summed in the
// same order, so its bits depend neither on the batch nor on the number of threads.
#pragma once

#include "convert.h"
#include "kernels.h"
#include "products.h"

namespace modelcenter {
namespace {

constexpr int64_t kOfMatrix = 4, kOfRows = 3;  // rows taken together: their sums are in 12 of the 16 registers of AVX2
constexpr int64_t kStretch = 1024;             // elements of a row: those of seven rows fit the L1 cache
#if defined(__AVX512F__)
constexpr int64_t kFewRows = 0, kFewRowsOfGroups = 12;  // a product alone is oneDNN's
#else
constexpr int64_t kFewRows = 48, kFewRowsOfGroups = 48;
#endif

typedef float Eight __attribute__((vector_size(32), aligned(4), may_alias));
typedef float Four __attribute__((vector_size(16), aligned(4), may_alias));

MC_INLINE Eight plus_products(Eight sum, Eight x, Eight y) {
#if defined(__AVX2__)
  return (Eight)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)sum);
#else
  return sum + x * y;
#endif
}

// The sum of each of four vectors.
MC_INLINE Four sums_of(const Eight* x) {
#if defined(__AVX2__)
  const __m256 low = _mm256_hadd_ps((__m256)x[0], (__m256)x[1]), high = _mm256_hadd_ps((__m256)x[2], (__m256)x[3]);
  const __m256 quarters = _mm256_hadd_ps(low, high);
  return (Four)_mm_add_ps(_mm256_castps256_ps128(quarters), _mm256_extractf128_ps(quarters, 1));
#else
  Four sums;
  for (int i = 0; i < 4; i++)
    sums[i] = ((x[i][0] + x[i][1]) + (x[i][2] + x[i][3])) + ((x[i][4] + x[i][5]) + (x[i][6] + x[i][7]));
  return sums;
#endif
}

// out = the products of kA rows of a with kB of b over `depth` elements, added to `out`, or to a bias, which may be
// null. kFirst: b has not been read yet, so its next rows are prefetched.
template <int kA, int kB, bool kFirst>
MC_INLINE void multiply_rows(const Product& p, const float* a, const float* b, int64_t depth, float* out,
                             const float* bias, bool add) {
  Eight sum[kA][kOfMatrix];
#pragma GCC unroll 4
  for (int i = 0; i < kA; i++)
#pragma GCC unroll 4
    for (int j = 0; j < kOfMatrix; j++) sum[i][j] = Eight{};
  int64_t t = 0;
  for (; t + 8 <= depth; t += 8) {
    if (kFirst && t % 16 == 0)
#pragma GCC unroll 4
      for (int j = 0; j < kB; j++) fetch(b + (j + kB) * p.b_stride + t);
    Eight x[kA];
#pragma GCC unroll 4
    for (int i = 0; i < kA; i++) x[i] = *(const Eight*)(a + i * p.a_stride + t);
#pragma GCC unroll 4
    for (int j = 0; j < kB; j++) {
      const Eight y = *(const Eight*)(b + j * p.b_stride + t);
#pragma GCC unroll 4
      for (int i = 0; i < kA; i++) sum[i][j] = plus_products(sum[i][j], x[i], y);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < kA; i++, out += p.out_stride) {
    Four sums = sums_of(sum[i]);
    for (int64_t rest = t; rest < depth; rest++)
      for (int j = 0; j < kB; j++) sums[j] += a[i * p.a_stride + rest] * b[j * p.b_stride + rest];
    for (int j = 0; j < kB; j++) out[j] = add ? out[j] + sums[j] : bias ? bias[j] + sums[j] : sums[j];
  }
}

// `multiply_rows` for all rows of a.
template <int kB>
MC_INLINE void multiply_all(const Product& p, int64_t rows, const float* a, const float* b, int64_t depth, float* out,
                            const float* bias, bool add) {
  if (rows == 1) return multiply_rows<1, kB, true>(p, a, b, depth, out, bias, add);
  if (rows == 2) return multiply_rows<2, kB, true>(p, a, b, depth, out, bias, add);
  multiply_rows<kOfRows, kB, true>(p, a, b, depth, out, bias, add);
  int64_t i = kOfRows;
  for (; i + kOfRows <= rows; i += kOfRows)
    multiply_rows<kOfRows, kB, false>(p, a + i * p.a_stride, b, depth, out + i * p.out_stride, bias, add);
  a += i * p.a_stride, out += i * p.out_stride;
  if (rows - i == 2) multiply_rows<2, kB, false>(p, a, b, depth, out, bias, add);
  if (rows - i == 1) multiply_rows<1, kB, false>(p, a, b, depth, out, bias, add);
}

void product_of_few(const Product& p, int64_t rows, int64_t left, int64_t right) {
  for (int64_t j = left; j < right;) {
    const bool together = j + kOfMatrix <= right;
    for (int64_t t = 0; t < p.depth; t += kStretch) {
      const int64_t depth = p.depth - t < kStretch ? p.depth - t : kStretch;
      const float *a = p.a + t, *b = p.b + j * p.b_stride + t, *bias = p.bias && !t ? p.bias + j : nullptr;
      if (together) multiply_all<kOfMatrix>(p, rows, a, b, depth, p.out + j, bias, t > 0);
      else multiply_all<1>(p, rows, a, b, depth, p.out + j, bias, t > 0);
    }
    j += together ? kOfMatrix : 1;
  }
}

}  // namespace
}  // namespace modelcenter
