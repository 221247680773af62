// Attention of one sequence by the heads that share a key head, a part of cpu/kernels.cpp, compiled for each
// instruction set.
//
// 32 queries are worked on at a time, a lane each: scores lie as (keys, 32), so that a softmax needs no sums across a
// vector, what a query may not see is not worked out, and scores never leave the caches. As in FlashAttention (Dao et
// al. 2022, arXiv:2205.14135) backward works out the weights again, from the largest score and the sum of each query.
#pragma once

#include "lanes.h"
#include "products.h"

namespace modelcenter {
namespace {

constexpr int64_t kQueries = 32;  // of a block
constexpr int64_t kNumbers = 64;  // exponentials that are added up in one go
constexpr float kHidden = -__builtin_inff();  // no score is less, so a row of none but these has no softmax
static_assert(kQueries == kWide, "queries are the columns of a tile");

MC_INLINE int64_t whole(int64_t n, int64_t of) { return (n + of - 1) / of * of; }

// The rooms of a sequence of so many keys with heads of so many channels, one after the other.
struct Rooms {
  int64_t keys, width;
  float *k, *v, *scores, *queries, *out, *bias;            // forward
  float *slopes, *grads, *rows, *dk, *dv, *dbias;          // backward
  int64_t numbers;

  Rooms(float* room, int64_t queries_, int64_t keys_, int64_t channels, bool backward)
      : keys(whole(keys_, kTall)), width(whole(channels, kWide)) {
    float* next = room;
    const auto take = [&](int64_t n) { return (next += whole(n, 16)) - whole(n, 16); };
    k = take(keys * width), v = take(keys * width), scores = take(keys * kQueries);
    queries = take(width * kQueries), out = take(kQueries * width), bias = take(queries_ + keys_ + 2 * kQueries);
    if (backward) {
      slopes = take(keys * kQueries), grads = take(width * kQueries);
      rows = take(kQueries * width);
      dk = take(keys * width), dv = take(keys * width), dbias = take(queries_ + keys_ + 2 * kQueries);
    }
    numbers = next - room;
  }
};

int64_t attention_room(int64_t queries, int64_t keys, int64_t channels, bool backward) {
  return Rooms(nullptr, queries, keys, channels, backward).numbers;
}

// A head's numbers of one token. They are few: a call of memcpy costs as much as what it does.
MC_INLINE void move(const float* __restrict from, int64_t n, float* __restrict to) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) *(Sixteen*)(to + i) = *(const Sixteen*)(from + i);
  for (; i < n; i++) to[i] = from[i];
}

// Zeros for a few numbers, a multiple of 16: what compilers make of memset begins slowly.
MC_INLINE void clear(float* to, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) *(Sixteen*)(to + i) = Sixteen{};
}

// Rows of one head as rows of `width` numbers, and zeros up to row `height`.
MC_INLINE void copy_head(const float* x, int64_t stride, int64_t channels, int64_t rows, int64_t width, int64_t height,
                         float* __restrict to) {
  for (int64_t i = 0; i < rows; i++, x += stride, to += width) {
    move(x, channels, to);
    for (int64_t c = channels; c < width; c++) to[c] = 0.0f;
  }
  clear(to, (height - rows) * width);
}

// Rows of one head whose number is a multiple of a tile's width: where they are, or copied.
struct Rows {
  const float* at;
  int64_t stride;
};
MC_INLINE Rows rows_of(const float* x, int64_t stride, int64_t channels, int64_t rows, int64_t width, float* room) {
  if (channels == width) return {x, stride};
  copy_head(x, stride, channels, rows, width, rows, room);
  return {room, width};
}

// Queries [first, first + lanes) of a sequence, and the keys [begin, end) that any of them sees.
struct Block {
  int64_t first, lanes, begin, end, top, bottom;  // top, bottom: the same keys in whole tiles

  Block(const Attention& a, int64_t first_, int64_t queries, int64_t keys) : first(first_) {
    lanes = queries - first < kQueries ? queries - first : kQueries;
    end = a.causal && first + lanes < keys ? first + lanes : keys;
    begin = a.causal && a.window > 0 && first - a.window + 1 > 0 ? first - a.window + 1 : 0;
    top = begin / kTall * kTall;
    bottom = whole(end, kTall);
  }
  // The lanes [from, to) that see a key.
  MC_INLINE int64_t from(const Attention& a, int64_t key) const { return a.causal && key > first ? key - first : 0; }
  MC_INLINE int64_t to(const Attention& a, int64_t key) const {
    const int64_t most = a.window + key - first;
    return a.causal && a.window > 0 && most < kQueries ? (most > 0 ? most : 0) : kQueries;
  }
};

// (keys, 32) = the products of keys with queries.
MC_INLINE void products_with(const float* rows, const Rooms& r, int64_t channels, const float* queries, const Block& b,
                             float* to) {
  for (int64_t j = b.top; j < b.bottom; j += kTall)
    tile(channels, rows + j * r.width, r.width, 1, queries, kQueries, to + j * kQueries, kQueries, false);
}

// (32, width) = the sums over the keys of weights (keys, 32) times rows (keys, width).
MC_INLINE void mix_of(const float* weights, const float* rows, const Rooms& r, const Block& b, float* to) {
  for (int64_t c = 0; c < r.width; c += kWide)
    for (int64_t i = 0; i < b.lanes; i += kTall)
      tile(b.end - b.begin, weights + b.begin * kQueries + i, 1, kQueries, rows + b.begin * r.width + c, r.width,
           to + i * r.width + c, r.width, false);
}

// (keys, width) += the sums over the queries of weights (keys, 32) times rows (32, width).
MC_INLINE void add_mix(const float* weights, const Rows& rows, const Rooms& r, const Block& b, float* to) {
  for (int64_t c = 0; c < r.width; c += kWide)
    for (int64_t j = b.top; j < b.bottom; j += kTall)
      tile(b.lanes, weights + j * kQueries, kQueries, 1, rows.at + c, rows.stride, to + j * r.width + c, r.width,
           true);
}

// Scores from products: scaled, with the bias, and kHidden where a query does not see a key.
MC_INLINE void score(const Attention& a, const Block& b, const float* bias, int64_t keys, float* scores) {
  for (int64_t j = b.begin; j < b.end; j++) {
    float* __restrict row = scores + j * kQueries;
    if (bias) {
      const float* __restrict add = bias + (b.first - j + keys - 1);
      for (int64_t l = 0; l < kQueries; l++) row[l] = row[l] * a.scale + add[l];
    } else {
      for (int64_t l = 0; l < kQueries; l++) row[l] *= a.scale;
    }
    const int64_t from = b.from(a, j), to = b.to(a, j);
    for (int64_t l = 0; l < from; l++) row[l] = kHidden;
    for (int64_t l = to; l < kQueries; l++) row[l] = kHidden;
  }
}

// What is left of a key's row where a query does not see it: nothing.
MC_INLINE void hide(const Attention& a, const Block& b, int64_t key, float* row) {
  const int64_t from = b.from(a, key), to = b.to(a, key);
  for (int64_t l = 0; l < from; l++) row[l] = 0.0f;
  for (int64_t l = to; l < kQueries; l++) row[l] = 0.0f;
}

// No weight for keys that are in the first and the last tile of those that are seen, and are not seen.
MC_INLINE void clear_edges(const Block& b, float* weights) {
  clear(weights + b.top * kQueries, (b.begin - b.top) * kQueries);
  clear(weights + b.end * kQueries, (b.bottom - b.end) * kQueries);
}

// Runs body(key, words or null, half): the random words of the block's queries for each key, if any are dropped.
template <class Body>
MC_INLINE void each_key(const Attention& a, const Block& b, const uint64_t* numbers, const Body& body) {
  alignas(64) uint32_t words[kDropoutLanes][4][kQueries] = {};
  int64_t drawn = -1;
  for (int64_t j = b.begin; j < b.end; j++) {
    if (!a.draw.threshold) {
      body(j, (const uint32_t*)nullptr, 0);
      continue;
    }
    const int64_t block = j / kDropoutBlock, channel = j % kDropoutBlock, group = channel / kDropoutLanes;
    if (block != drawn) {
      const int64_t keys = b.end - block * kDropoutBlock;  // of the block, of which the first take a counter each
      for (int64_t c = 0; c < kDropoutLanes && c < keys; c++)
        draw_tokens(a.draw, numbers, b.lanes, (uint32_t)(block * kDropoutLanes + c), words[c]);
      drawn = block;
    }
    body(j, (const uint32_t*)words[channel % kDropoutLanes][group / 2], (int)(group % 2));
  }
}

MC_INLINE void drop(const Attention& a, const uint32_t* __restrict words, int half, float* __restrict row) {
  for (int64_t l = 0; l < kQueries; l++) row[l] = dropped(row[l], words[l], half, a.draw.threshold, a.draw.scale);
}

// The numbers of a block's queries, from which a head draws. Lanes without a query repeat the last.
MC_INLINE void number(const Attention& a, int64_t query, const Block& b, int64_t head, uint64_t* numbers) {
  for (int64_t l = 0; l < kQueries; l++) {
    const int64_t i = query + b.first + (l < b.lanes ? l : b.lanes - 1);
    numbers[l] = (uint64_t)(a.tokens ? a.tokens[i] : i) + ((uint64_t)(a.first_head + head) << 20);
  }
}

// The bias of query minus key, from 1 - keys on, so that it rises with the lanes; zeros behind it.
MC_INLINE const float* turned_bias(const Attention& a, int64_t head, int64_t queries, int64_t keys, float* room) {
  if (!a.bias) return nullptr;
  const float* middle = a.bias + head * a.bias_width + a.bias_width / 2;
  for (int64_t i = 0; i < queries + keys - 1; i++) room[i] = middle[keys - 1 - i];
  memset(room + queries + keys - 1, 0, sizeof(float) * kQueries);
  return room;
}

// out of queries [query, query + queries) over keys [key, key + keys), of the heads that share key head `group`.
void attention(const Attention& a, int64_t query, int64_t queries, int64_t key, int64_t keys, int64_t group,
               float* room) {
  const Rooms r(room, queries, keys, a.channels, false);
  const int64_t share = a.heads / a.groups, q_stride = a.heads * a.channels, k_stride = a.groups * a.channels;
  copy_head(a.k + key * k_stride + group * a.channels, k_stride, a.channels, keys, r.width, r.keys, r.k);
  copy_head(a.v + key * k_stride + group * a.channels, k_stride, a.channels, keys, r.width, r.keys, r.v);
  for (int64_t head = group * share; head < (group + 1) * share; head++) {
    const float* bias = turned_bias(a, head, queries, keys, r.bias);
    for (int64_t first = 0; first < queries; first += kQueries) {
      const Block b(a, first, queries, keys);
      const int64_t at = (query + first) * q_stride + head * a.channels;
      turn<kQueries>(a.q + at, q_stride, a.channels, b.lanes, r.queries);
      products_with(r.k, r, a.channels, r.queries, b, r.scores);
      score(a, b, bias, keys, r.scores);
      alignas(64) float most[kQueries], sum[kQueries], total[kQueries] = {};
      for (int64_t l = 0; l < kQueries; l++) most[l] = kHidden;
      for (int64_t j = b.begin; j < b.end; j++) {
        const float* __restrict row = r.scores + j * kQueries;
        for (int64_t l = 0; l < kQueries; l++) most[l] = row[l] > most[l] ? row[l] : most[l];
      }
      for (int64_t j = b.begin; j < b.end; j += kNumbers) {
        memset(sum, 0, sizeof sum);
        for (int64_t i = j; i < b.end && i < j + kNumbers; i++) {
          float* __restrict row = r.scores + i * kQueries;
          for (int64_t l = 0; l < kQueries; l++) row[l] = exponential(row[l] - most[l], 0.0f);
          hide(a, b, i, row);
          for (int64_t l = 0; l < kQueries; l++) sum[l] += row[l];
        }
        for (int64_t l = 0; l < kQueries; l++) total[l] += sum[l];
      }
      if (a.draw.threshold) {
        uint64_t numbers[kQueries];
        number(a, query, b, head, numbers);
        each_key(a, b, numbers, [&](int64_t j, const uint32_t* words, int half) {
          drop(a, words, half, r.scores + j * kQueries);
        });
      }
      mix_of(r.scores, r.v, r, b, r.out);
      for (int64_t l = 0; l < b.lanes; l++) {
        const float share_of_sum = 1.0f / total[l];
        const float* __restrict from = r.out + l * r.width;
        float* __restrict to = a.out + at + l * q_stride;
        for (int64_t c = 0; c < a.channels; c++) to[c] = from[c] * share_of_sum;
        float* sums = a.sums + ((query + first + l) * a.heads + head) * 2;
        sums[0] = most[l], sums[1] = total[l];
      }
    }
  }
}

// What the gradient a.grad of a.out is of q, k and v, and of the bias: dbias, (heads, queries + keys - 1), of query
// minus key, from 1 - keys on; null without a bias.
void attention_backward(const Attention& a, int64_t query, int64_t queries, int64_t key, int64_t keys, int64_t group,
                        float* dbias, float* room) {
  const Rooms r(room, queries, keys, a.channels, true);
  const int64_t share = a.heads / a.groups, q_stride = a.heads * a.channels, k_stride = a.groups * a.channels;
  const int64_t k_at = key * k_stride + group * a.channels, differences = queries + keys - 1;
  copy_head(a.k + k_at, k_stride, a.channels, keys, r.width, r.keys, r.k);
  copy_head(a.v + k_at, k_stride, a.channels, keys, r.width, r.keys, r.v);
  memset(r.dk, 0, sizeof(float) * (size_t)(r.keys * r.width));
  memset(r.dv, 0, sizeof(float) * (size_t)(r.keys * r.width));
  for (int64_t head = group * share; head < (group + 1) * share; head++) {
    const float* bias = turned_bias(a, head, queries, keys, r.bias);
    if (dbias) memset(r.dbias, 0, sizeof(float) * (size_t)(differences + kQueries));
    for (int64_t first = 0; first < queries; first += kQueries) {
      const Block b(a, first, queries, keys);
      const int64_t at = (query + first) * q_stride + head * a.channels;
      turn<kQueries>(a.q + at, q_stride, a.channels, b.lanes, r.queries);
      turn<kQueries>(a.grad + at, q_stride, a.channels, b.lanes, r.grads);
      alignas(64) float most[kQueries] = {}, part[kQueries] = {}, along[kQueries] = {};
      for (int64_t l = 0; l < b.lanes; l++) {
        const float* sums = a.sums + ((query + first + l) * a.heads + head) * 2;
        most[l] = sums[0], part[l] = 1.0f / sums[1];
        const float *g = a.grad + at + l * q_stride, *o = a.out + at + l * q_stride;
        along[l] = row_sum(a.channels, [&](int64_t c) { return g[c] * o[c]; });
      }
      products_with(r.k, r, a.channels, r.queries, b, r.scores);
      products_with(r.v, r, a.channels, r.grads, b, r.slopes);
      score(a, b, bias, keys, r.scores);
      uint64_t numbers[kQueries];
      number(a, query, b, head, numbers);
      each_key(a, b, numbers, [&](int64_t j, const uint32_t* words, int half) {
        float* __restrict weights = r.scores + j * kQueries;
        float* __restrict slopes = r.slopes + j * kQueries;
        alignas(64) float before[kQueries];
        for (int64_t l = 0; l < kQueries; l++) weights[l] = exponential(weights[l] - most[l], 0.0f) * part[l];
        hide(a, b, j, weights);
        memcpy(before, weights, sizeof before);
        if (words) {
          drop(a, words, half, weights);
          drop(a, words, half, slopes);
        }
        for (int64_t l = 0; l < kQueries; l++) slopes[l] = before[l] * (slopes[l] - along[l]);
        if (dbias) {
          float* __restrict to = r.dbias + (b.first - j + keys - 1);
          for (int64_t l = 0; l < kQueries; l++) to[l] += slopes[l];
        }
        for (int64_t l = 0; l < kQueries; l++) slopes[l] *= a.scale;
      });
      clear_edges(b, r.scores);
      clear_edges(b, r.slopes);
      add_mix(r.scores, rows_of(a.grad + at, q_stride, a.channels, b.lanes, r.width, r.rows), r, b, r.dv);
      add_mix(r.slopes, rows_of(a.q + at, q_stride, a.channels, b.lanes, r.width, r.rows), r, b, r.dk);
      mix_of(r.slopes, r.k, r, b, r.out);
      for (int64_t l = 0; l < b.lanes; l++)
        move(r.out + l * r.width, a.channels, a.dq + at + l * q_stride);
    }
    if (dbias) memcpy(dbias + head * differences, r.dbias, sizeof(float) * (size_t)differences);
  }
  for (int64_t j = 0; j < keys; j++) {
    move(r.dk + j * r.width, a.channels, a.dk + k_at + j * k_stride);
    move(r.dv + j * r.width, a.channels, a.dv + k_at + j * k_stride);
  }
}

}  // namespace
}  // namespace modelcenter
