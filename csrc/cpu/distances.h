// The terms that the distance between a query and a key adds to their score: the query's product with a table's vector
// for the distance, and the key's product with that of another table, as in DeBERTa (He et al. 2020, arXiv:2006.03654,
// section 3.1). Part of cpu/kernels.cpp, compiled for each instruction set.
//
// All are products of tiles. Queries are multiplied with the vectors of all distances in a block, and the diagonals of
// the result are added; keys are multiplied 8 at a time, with the few distances that they have from a block. Backward
// needs no diagonals: an operand of a tile whose rows are one number further apart runs along them.
#pragma once

#include "attention_blocks.h"

namespace modelcenter {
namespace {

constexpr int64_t kPanel = 16;   // distances whose vectors are transposed together
constexpr int64_t kMargin = 64;  // rows of zeros on either side of a table, for blocks and tiles that extend beyond it
constexpr int64_t kBeyond = 40;  // rows of zeros on either side of a block's gradients; on either side of its lanes:
constexpr int64_t kAside = 8;

// A head's tables for sequences of up to `reach` tokens, as consecutive arrays in the memory of a thread. Row d of a
// table is for a key d places after its query.
struct Tables {
  int64_t reach, width, channels;
  float *keys, *queries;    // rows of `width` numbers
  float* panels;            // `queries`, transposed, by query minus key
  float* products;          // by distances and lanes of a block
  float *dkeys, *dqueries;  // the gradients of the tables
  float* slopes;            // the gradients of a block's scores, surrounded by zeros
  int64_t numbers;

  Tables(float* memory, int64_t reach_, int64_t channels_, bool backward)
      : reach(reach_), width(whole(channels_, kWide)), channels(channels_) {
    float* next = memory;
    const auto take = [&](int64_t n) { return (next += whole(n, 16)) - whole(n, 16); };
    keys = take(rows() * width), queries = take(rows() * width);
    panels = take(panel_count() * kPanel * channels);
    products = take((whole(reach, kPanel) + kQueries) * kQueries);
    dkeys = dqueries = slopes = nullptr;
    if (backward) {
      dkeys = take(rows() * width), dqueries = take(rows() * width);
      slopes = take((reach + 2 * kBeyond) * (kQueries + 2 * kAside));
    }
    numbers = next - memory;
  }
  MC_INLINE int64_t rows() const { return 2 * (reach + kMargin) - 1; }
  MC_INLINE int64_t row(int64_t distance) const { return (distance + reach - 1 + kMargin) * width; }
  // The least difference of query and key in the panels, and the number of panels.
  MC_INLINE int64_t least() const { return -whole(reach, kPanel); }
  MC_INLINE int64_t panel_count() const { return (reach + kMargin - kPanel - least()) / kPanel; }
};

int64_t distances_scratch(int64_t reach, int64_t channels, bool backward) {
  return Tables(nullptr, reach, channels, backward).numbers;
}

MC_INLINE Tables tables_of(const Attention& a, bool backward) { return {a.tables, a.reach, a.channels, backward}; }

// Copies one head of a table (table_rows, heads * channels), with zeros around it.
MC_INLINE void copy_table(const Attention& a, const Tables& t, const float* table, int64_t head, float* to) {
  const int64_t stride = a.heads * a.channels, rows = 2 * t.reach - 1;
  clear(to, kMargin * t.width);
  copy_head(table + (a.table_rows / 2 + 1 - t.reach) * stride + head * a.channels, stride, a.channels, rows, t.width,
            rows + kMargin, to + kMargin * t.width);
}

// Fills a.tables, for sequences of up to a.reach tokens, from a head's tables; their gradients are zero.
void distances_begin(const Attention& a, int64_t head, bool backward) {
  const Tables t = tables_of(a, backward);
  if (a.of_keys) copy_table(a, t, a.of_keys, head, t.keys);
  if (a.of_queries) {
    copy_table(a, t, a.of_queries, head, t.queries);
    for (int64_t p = 0; p < t.panel_count(); p++)
      transpose_panel<kPanel>(t.queries + t.row(-t.least() - p * kPanel), -t.width, t.channels, kPanel,
                              t.panels + p * kPanel * t.channels);
  }
  if (!backward) return;
  clear(t.dkeys, t.rows() * t.width);
  clear(t.dqueries, t.rows() * t.width);
}

// The gradients of the tables for 2 * a.reach - 1 distances; null: not wanted.
void distances_end(const Attention& a, float* dkeys, float* dqueries) {
  const Tables t = tables_of(a, true);
  float* const to[2] = {dkeys, dqueries};
  for (int which = 0; which < 2; which++)
    for (int64_t d = 1 - t.reach; to[which] && d < t.reach; d++)
      move((which ? t.dqueries : t.dkeys) + t.row(d), t.channels, to[which] + (d + t.reach - 1) * t.channels);
}

// For each lane: y if its number has the bit kBit, else x.
template <int kBit>
MC_INLINE Vector choose(Vector x, Vector y) {
  constexpr unsigned kLanesOf = kBit == 8 ? 0xFF00u : kBit == 4 ? 0xF0F0u : kBit == 2 ? 0xCCCCu : 0xAAAAu;
#if defined(__AVX512F__)
  return (Vector)_mm512_mask_blend_ps((__mmask16)kLanesOf, (__m512)x, (__m512)y);
#elif defined(__AVX2__)
  return (Vector)_mm256_blend_ps((__m256)x, (__m256)y, (int)(kLanesOf & 0xFF));
#else
  for (int l = 0; l < kNumbersEach; l++) x[l] = kLanesOf >> l & 1 ? y[l] : x[l];
  return x;
#endif
}

// Shears rows of vectors: shifts each lane by as many rows as the bits of its number up to kBit say.
template <int kBit>
MC_INLINE void shear(Vector (&x)[2 * kNumbersEach - 1]) {
  if constexpr (kBit > 0) {
    constexpr int kFirst = kNumbersEach - kBit;  // of the rows still needed
#pragma GCC unroll 32
    for (int s = 2 * kNumbersEach - 2; s >= kFirst; s--) x[s] = choose<kBit>(x[s], x[s - kBit]);
    shear<kBit / 2>(x);
  }
}

// scores (keys, lanes) += each query's product with the vector for its distance from the key.
template <int64_t kOf>
MC_INLINE void add_products_of_queries(const Tables& t, const Block<kOf>& b, const float* queries, float* scores) {
  constexpr int64_t kN = kNumbersEach;
  const int64_t keys = b.end - b.begin, rows = whole(keys, kPanel) + kOf;
  const float* const from = t.keys + t.row(b.begin - b.first - (kOf - 1));
  for (int64_t r = 0; r < rows; r += kTall)
    tile<kOf>(t.channels, from + r * t.width, t.width, 1, queries, kOf, t.products + r * kOf, kOf, false);
  for (int64_t l = 0; l < kOf; l += kN)
    for (int64_t j = 0; j < keys; j += kN) {
      const float* const top = t.products + (j + kOf - l - kN) * kOf + l;
      float* const to = scores + (b.begin + j) * kOf + l;
      Vector x[2 * kN - 1];
#pragma GCC unroll 32
      for (int s = 0; s < 2 * kN - 1; s++) x[s] = *(const Vector*)(top + s * kOf);
      shear<kN / 2>(x);
      if (j + kN <= keys) {
#pragma GCC unroll 16
        for (int s = 0; s < kN; s++) *(Vector*)(to + s * kOf) += x[s + kN - 1];
      } else {
        for (int s = 0; s < keys - j; s++) *(Vector*)(to + s * kOf) += x[s + kN - 1];
      }
    }
}

// scores (keys, lanes) += each key's product with the vector for its distance from the query. keys: (keys, width).
template <int64_t kOf>
MC_INLINE void add_products_of_keys(const Tables& t, const Block<kOf>& b, const float* keys, float* scores) {
  constexpr int64_t kSpan = kOf + kPanel;
  alignas(64) float products[kTall * kSpan];
  for (int64_t j = b.top; j < b.bottom; j += kTall) {
    const int64_t least = b.first - j - kTall - t.least(), panel = least / kPanel, rest = least % kPanel;
    for (int64_t x = 0; x < kSpan; x += kPanel)
      tile<kPanel>(t.channels, keys + j * t.width, t.width, 1, t.panels + (panel * kPanel + x) * t.channels, kPanel,
                   products + x, kSpan, false);
    for (int64_t r = 0; r < kTall; r++) {
      const float* __restrict from = products + r * kSpan + rest + kTall - r;
      float* __restrict to = scores + (j + r) * kOf;
      for (int64_t l = 0; l < kOf; l++) to[l] += from[l];
    }
  }
}

template <int64_t kOf>
MC_INLINE void add_distances(const Attention& a, const Tables& t, const Block<kOf>& b, const float* queries,
                             const float* keys, float* scores) {
  if (a.of_keys) add_products_of_queries(t, b, queries, scores);
  if (a.of_queries) add_products_of_keys(t, b, keys, scores);
}

// Adds the gradients that a block's gradients of products, slopes (keys, lanes), give to the tables, to keys, dk (keys,
// width), and to queries, dq (lanes, width). keys: (keys, width).
template <int64_t kOf>
MC_INLINE void add_gradients_of_distances(const Attention& a, const Tables& t, const Block<kOf>& b, const float* slopes,
                                          const Rows& queries, const float* keys, float* dk, float* dq) {
  constexpr int64_t kStride = kOf + 2 * kAside;
  const int64_t low = b.begin - b.first - (kOf - 1), high = b.end - b.first;  // the distances [low, high)
  float* next = t.slopes;
  clear(next, kBeyond * kStride);
  next += kBeyond * kStride;
  for (int64_t j = b.begin; j < b.end; j++, next += kStride) {
    for (int64_t l = 0; l < kAside; l++) next[l] = next[kAside + kOf + l] = 0.0f;
    move(slopes + j * kOf, kOf, next + kAside);
  }
  clear(next, kBeyond * kStride);
  const auto at = [&](int64_t key, int64_t lane) {
    return t.slopes + (key - b.begin + kBeyond) * kStride + kAside + lane;
  };
  for (int64_t c = 0; a.of_keys && c < t.width; c += kWide) {
    for (int64_t d = low; d < high; d += kTall)
      tile(b.count, at(b.first + d, 0), kStride, kStride + 1, queries.at + c, queries.stride, t.dkeys + t.row(d) + c,
           t.width, true);
    for (int64_t l = 0; l < b.count; l += kTall) {
      const int64_t least = b.begin - b.first - l - (kTall - 1);
      tile(b.end - b.begin + kTall - 1, at(b.begin - (kTall - 1), l), kStride + 1, kStride, t.keys + t.row(least) + c,
           t.width, dq + l * t.width + c, t.width, true);
    }
  }
  for (int64_t c = 0; a.of_queries && c < t.width; c += kWide) {
    for (int64_t d = low; d < high; d += kTall) {
      const int64_t from = b.first + d > b.begin ? b.first + d : b.begin;
      const int64_t behind = b.first + d + kTall - 1 + kOf, to = behind < b.end ? behind : b.end;
      tile(to - from, at(from, from - b.first - d), -1, kStride + 1, keys + from * t.width + c, t.width,
           t.dqueries + t.row(d) + c, t.width, true);
    }
    for (int64_t j = b.top; j < b.bottom; j += kTall)
      tile(kOf + kTall - 1, at(j, kOf - 1), kStride + 1, -1, t.queries + t.row(j - b.first - (kOf - 1)) + c, t.width,
           dk + j * t.width + c, t.width, true);
  }
}

}  // namespace
}  // namespace modelcenter
