// Shared by the kernels of attention: heads, and the blocks of queries that they process; part of cpu/kernels.cpp,
// compiled for each instruction set.
#pragma once

#include "kernels.h"
#include "lanes.h"
#include "products.h"

namespace modelcenter {
namespace {

constexpr int64_t kQueries = 32, kFew = kQueries / 2;  // lanes of a block
constexpr int64_t kNumbers = 64;  // exponentials that are summed at a time
constexpr float kHidden = -__builtin_inff();  // the smallest score: a row with nothing else has no softmax
static_assert(kQueries == kWide, "queries are the columns of a tile");

MC_INLINE int64_t whole(int64_t n, int64_t of) { return (n + of - 1) / of * of; }

// Copies one token's numbers of a head. They are few: the call of memcpy would cost as much as the copy.
MC_INLINE void move(const float* __restrict from, int64_t n, float* __restrict to) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) *(Sixteen*)(to + i) = *(const Sixteen*)unknown(from + i);
  for (; i < n; i++) to[i] = *unknown(from + i);
}

// Copies the rows of one head as rows of `width` numbers, followed by zeros up to row `height`.
MC_INLINE void copy_head(const float* x, int64_t stride, int64_t channels, int64_t rows, int64_t width, int64_t height,
                         float* __restrict to) {
  for (int64_t i = 0; i < rows; i++, x += stride, to += width) {
    move(x, channels, to);
    for (int64_t c = channels; c < width; c++) *unknown(to + c) = 0.0f;
  }
  clear(to, (height - rows) * width);
}

// The rows of one head, padded to `width`, a multiple of a tile's width: in place, or copied.
MC_INLINE Rows rows_of(const float* x, int64_t stride, int64_t channels, int64_t rows, int64_t width, float* scratch) {
  if (channels == width) return {x, stride};
  copy_head(x, stride, channels, rows, width, rows, scratch);
  return {scratch, width};
}

// Queries [first, first + count) of a sequence in kOf lanes, and the keys [begin, end) that at least one of them sees.
template <int64_t kOf>
struct Block {
  int64_t first, count, begin, end, top, bottom;  // top, bottom: the same keys in whole tiles
  int64_t ahead;  // how many tokens after itself a query sees

  Block(const Attention& a, int64_t first_, int64_t queries, int64_t keys) : first(first_) {
    count = queries - first < kOf ? queries - first : kOf;
    ahead = a.causal ? 0 : a.window > 0 ? a.window - 1 : keys;
    end = first + count + ahead < keys ? first + count + ahead : keys;
    begin = a.window > 0 && first - a.window + 1 > 0 ? first - a.window + 1 : 0;
    top = begin / kTall * kTall;
    bottom = whole(end, kTall);
  }
  // The lanes [from, to) that see a key.
  MC_INLINE int64_t from(int64_t key) const { return key > first + ahead ? key - first - ahead : 0; }
  MC_INLINE int64_t to(const Attention& a, int64_t key) const {
    const int64_t most = a.window + key - first;
    return a.window > 0 && most < kOf ? (most > 0 ? most : 0) : kOf;
  }
};

// One head of the queries of a sequence, which begin at `query`, with so many keys.
struct Part {
  int64_t query, queries, keys, head;

  MC_INLINE int64_t stride(const Attention& a) const { return a.heads * a.channels; }  // from query to query
  // The place of the first channel of a block's first query, and of its largest score and sum.
  MC_INLINE int64_t at(const Attention& a, int64_t first) const {
    return (query + first) * stride(a) + head * a.channels;
  }
  MC_INLINE float* sums(const Attention& a, int64_t i) const { return a.sums + ((query + i) * a.heads + head) * 2; }
};

}  // namespace
}  // namespace modelcenter
