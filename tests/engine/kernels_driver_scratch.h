// Sections of kernels_driver.cpp: kernels that work in scratch memory, and those of bytes.
#pragma once
#include "kernels_driver.h"

// kernel: of numbers as they are, or rounded ones.
static void products(const ProductKernel kernel, const char* kind) {
  for (int64_t rows : {1, 21, 70})
    for (int64_t depth : {3, 200, 400})
      for (int64_t columns : {5, 161})
        for (bool transposed : {false, true}) {
          const bool add = rows == 70, turned = rows == 21;  // of b
          const std::vector<float> a = floats(rows * depth), b = floats(depth * columns), bias = floats(columns);
          const int64_t stride = columns + (turned ? 3 : 0);  // what lies between rows stays
          std::vector<float> out = add || turned ? floats(rows * stride) : unwritten(rows * stride);
          std::vector<float> sums = unwritten(rows);
          const Product p{out.data(), sums.data(), a.data(), b.data(), turned ? bias.data() : nullptr, columns, depth,
                          stride, transposed ? rows : depth, turned ? depth : columns, transposed, turned, add};
          const int64_t down = (rows + 31) / 32, across = (columns + 63) / 64;
          on_threads(down * across, [&](int64_t part) {
            const Scratch scratch(kProductScratch);
            const int64_t top = part / across * 32, left = part % across * 64;
            kernel(p, top, std::min(rows, top + 32), left, std::min(columns, left + 64), scratch.at);
          });
          const std::string name = kind + std::to_string(rows) + " " + std::to_string(depth) + " " +
                                   std::to_string(columns) + (transposed ? ", transposed" : "");
          show(name, out);
          show(name + ": sums", sums);
        }
}

static void products_of_few() {
  for (int64_t rows : {1, 2, 3, 7, 16})
    for (int64_t depth : {3, 8, 1037})
      for (int64_t columns : {1, 4, 11}) {
        const bool wide = rows % 2;  // what lies between rows stays
        const int64_t stride = columns + (wide ? 2 : 0);
        const std::vector<float> a = floats(rows * depth), b = floats(columns * depth), bias = floats(columns);
        std::vector<float> out = wide ? floats(rows * stride) : unwritten(rows * stride);
        const Product p{out.data(), nullptr, a.data(), b.data(), wide ? bias.data() : nullptr, columns, depth,
                        stride, depth, depth, false, true, false};
        on_threads((columns + 7) / 8, [&](int64_t part) {
          k.product_of_few(p, rows, part * 8, std::min(columns, part * 8 + 8));
        });
        show("product of few " + std::to_string(rows) + " " + std::to_string(depth) + " " + std::to_string(columns), out);
      }
}

struct Sequences {
  const char* name;
  std::vector<int64_t> queries, keys;  // their lengths
  int64_t heads, kv_heads, channels, window;
  bool causal, bias;
  uint32_t threshold;
  bool segments = false;
  float cap = 0.0f;
};

static std::vector<int64_t> offsets(const std::vector<int64_t>& lengths) {
  std::vector<int64_t> at(1, 0);
  for (int64_t n : lengths) at.push_back(at.back() + n);
  return at;
}

static void attention(bool rounds) {
  const std::vector<int64_t> small{1, 0, 31, 33}, large{40, 7, 150};
  const Sequences all[] = {
      {"plain", small, small, 4, 4, 8, 0, false, false, 0},
      {"dropped", large, large, 2, 1, 33, 0, false, false, 9000},
      {"causal", large, large, 3, 3, 20, 0, true, false, 0},
      {"window", large, large, 4, 2, 64, 11, true, true, 0},
      {"bias", small, small, 4, 2, 3, 0, false, true, 20000},
      {"cross", {5, 40, 0, 33, 1}, {90, 3, 8, 1, 129}, 4, 2, 32, 0, false, false, 6554},
      {"segments", large, large, 2, 1, 8, 0, false, true, 9000, true},
      {"capped", large, large, 4, 2, 20, 11, true, false, 0, false, 2.0f},
      {"capped bias", small, small, 2, 2, 33, 0, false, true, 9000, false, 0.5f},
  };
  for (const Sequences& s : all) {
    const std::vector<int64_t> queries = offsets(s.queries), keys = offsets(s.keys);
    const int64_t rows = queries.back(), key_rows = keys.back(), longest = 150;
    const int64_t q_numbers = rows * s.heads * s.channels, k_numbers = key_rows * s.kv_heads * s.channels;
    const std::vector<float> q = floats(q_numbers), key = floats(k_numbers), v = floats(k_numbers);
    const std::vector<float> grad = floats(q_numbers), bias = floats(s.heads * (2 * longest - 1));
    std::vector<int64_t> tokens((size_t)rows);
    for (int64_t i = 0; i < rows; i++) tokens[(size_t)i] = ((int64_t)mix(seed++) << 32) + i;
    std::vector<float> out = unwritten(q_numbers), sums = unwritten(rows * s.heads * 2), dq = unwritten(q_numbers);
    std::vector<float> dk = unwritten(k_numbers), dv = unwritten(k_numbers);
    Attention a{};
    a.q = q.data(), a.k = key.data(), a.v = v.data(), a.bias = s.bias ? bias.data() : nullptr, a.grad = grad.data();
    a.out = out.data(), a.sums = sums.data(), a.dq = dq.data(), a.dk = dk.data(), a.dv = dv.data();
    a.tokens = s.threshold > 8000 ? tokens.data() : nullptr;
    a.heads = s.heads, a.kv_heads = s.kv_heads, a.channels = s.channels, a.bias_width = 2 * longest - 1;
    a.window = s.window, a.first_head = 2, a.scale = 0.3f, a.cap = s.cap, a.causal = s.causal;
    a.draw = {nullptr, 0, 0, 0x12345678u, 0x9ABCDEF0u, 3, s.threshold, 65536.0f / (float)(65536 - s.threshold)};
    // By segments: tokens of three kinds, in runs.
    const std::vector<int32_t> rules{0, 1, -1, 2, 3, 4, -1, 7, 5};
    std::vector<int32_t> kinds((size_t)rows);
    for (int64_t i = 0; i < rows; i++) kinds[(size_t)i] = (int32_t)(i / 25 % 3);
    const std::vector<float> between = floats(s.heads * 3);
    if (s.segments) a.kinds = kinds.data(), a.rules = rules.data(), a.num_kinds = 3;
    if (s.segments) a.segment_bias = between.data(), a.segment_width = 3;
    std::vector<std::vector<float>> dbias, dsegments;  // of each sequence
    for (size_t i = 0; i < s.queries.size(); i++) dsegments.push_back(std::vector<float>(between.size(), 0.0f));
    for (size_t i = 0; i < s.queries.size(); i++)
      dbias.push_back(unwritten(s.heads * std::max((int64_t)0, s.queries[i] + s.keys[i] - 1)));
    const AttentionKernel attend = rounds ? rounded()->attention : k.attention;
    const AttentionBackwardKernel back = rounds ? rounded()->attention_backward : k.attention_backward;
    for (bool backward : {false, true})
      on_threads((int64_t)s.keys.size() * s.kv_heads, [&](int64_t unit) {
        const size_t i = (size_t)(unit / s.kv_heads);
        const int64_t n = s.queries[i], m = s.keys[i], group = unit % s.kv_heads;
        if (!m) return;
        const Scratch scratch(k.attention_scratch(n, m, s.channels, backward, s.cap > 0.0f, rounds));
        if (backward)
          back(a, queries[i], n, keys[i], m, group, s.bias ? dbias[i].data() : nullptr,
               s.segments ? dsegments[i].data() : nullptr, scratch.at);
        else
          attend(a, queries[i], n, keys[i], m, group, scratch.at);
      });
    const std::string name = std::string(rounds ? "rounded attention " : "attention ") + s.name;
    show(name, out);
    show(name + ": sums", sums);
    show(name + ": dq", dq);
    show(name + ": dk", dk);
    show(name + ": dv", dv);
    for (size_t i = 0; s.bias && i < dbias.size(); i++) show(name + ": dbias " + std::to_string(i), dbias[i]);
    for (size_t i = 0; s.segments && i < dsegments.size(); i++)
      show(name + ": dsegment_bias " + std::to_string(i), dsegments[i]);
  }
}

// Each head's sequences one after the other, with what distances add to their scores; tables are of more distances than
// there are.
static void distances() {
  struct Case {
    const char* name;
    std::vector<int64_t> lengths;
    int64_t heads, channels, window;
    bool causal, of_keys, of_queries;
    uint32_t threshold;
  };
  const Case all[] = {
      {"both", {1, 31, 33, 150}, 2, 8, 0, false, true, true, 0},
      {"dropped", {40, 7}, 3, 33, 0, false, true, true, 9000},
      {"of keys", {17, 64, 48}, 2, 32, 0, false, true, false, 0},
      {"of queries", {17, 64, 48}, 2, 3, 11, true, false, true, 0},
      {"none", {5}, 2, 4, 0, false, false, false, 0},
  };
  for (const Case& s : all) {
    const std::vector<int64_t> first = offsets(s.lengths);
    const int64_t stride = s.heads * s.channels, rows = first.back(), n = rows * stride;
    Attention a{};
    a.reach = *std::max_element(s.lengths.begin(), s.lengths.end());
    a.table_rows = 2 * a.reach + 3;
    const std::vector<float> q = floats(n), key = floats(n), v = floats(n), grad = floats(n);
    const std::vector<float> of_keys = floats(a.table_rows * stride), of_queries = floats(a.table_rows * stride);
    std::vector<float> out = unwritten(n), sums = unwritten(rows * s.heads * 2);
    std::vector<float> dq = unwritten(n), dk = unwritten(n), dv = unwritten(n);
    const int64_t of_table = (2 * a.reach - 1) * s.channels;
    std::vector<float> dkeys = unwritten(s.heads * of_table), dqueries = unwritten(s.heads * of_table);
    a.q = q.data(), a.k = key.data(), a.v = v.data(), a.grad = grad.data();
    a.out = out.data(), a.sums = sums.data(), a.dq = dq.data(), a.dk = dk.data(), a.dv = dv.data();
    a.of_keys = s.of_keys ? of_keys.data() : nullptr, a.of_queries = s.of_queries ? of_queries.data() : nullptr;
    a.heads = a.kv_heads = s.heads, a.channels = s.channels, a.window = s.window, a.causal = s.causal, a.scale = 0.3f;
    a.draw = {nullptr, 0, 0, 0x12345678u, 0x9ABCDEF0u, 3, s.threshold, 65536.0f / (float)(65536 - s.threshold)};
    for (bool backward : {false, true})
      on_threads(s.heads, [&](int64_t head) {
        const Scratch tables(k.distances_scratch(a.reach, s.channels, backward));
        Attention own = a;
        own.tables = tables.at;
        k.distances_begin(own, head, backward);
        for (size_t i = 0; i < s.lengths.size(); i++) {
          const int64_t m = s.lengths[i];
          const Scratch scratch(k.attention_scratch(m, m, s.channels, backward, false, false));
          if (backward) k.attention_backward(own, first[i], m, first[i], m, head, nullptr, nullptr, scratch.at);
          else k.attention(own, first[i], m, first[i], m, head, scratch.at);
        }
        if (backward)
          k.distances_end(own, s.of_keys ? dkeys.data() + head * of_table : nullptr,
                          s.of_queries ? dqueries.data() + head * of_table : nullptr);
      });
    const std::string name = std::string("attention by distances ") + s.name;
    show(name, out);
    show(name + ": sums", sums);
    show(name + ": dq", dq);
    show(name + ": dk", dk);
    show(name + ": dv", dv);
    if (s.of_keys) show(name + ": dkeys", dkeys);
    if (s.of_queries) show(name + ": dqueries", dqueries);
  }
}

static void bytes() {
  for (int size : {2, 4, 8})
    for (int64_t rows : {1, 33, 65})
      for (int64_t columns : {3, 32, 71})
        for (int64_t extra : {0, 5})      // numbers between rows
          for (bool past : {false, true}) {
            const int64_t shift = extra ? 1 : 0, in_stride = columns + extra, out_stride = (rows + 31) / 32 * 32 + extra;
            const Bytes in = codes(((rows - 1) * in_stride + columns) * size + shift);
            const int64_t written = ((columns - 1) * out_stride + rows) * size + shift;
            const Scratch out((written + 3) / 4);
            k.transpose((char*)out.at + shift, in.data() + shift, size, rows, columns, out_stride, in_stride, past);
            show("transpose " + std::to_string(size) + " " + std::to_string(rows) + " " + std::to_string(columns) +
                     (extra ? ", apart" : "") + (past ? ", past caches" : ""), "u8", out.at, (size_t)written, 1);
          }
  const Bytes x = codes(301);
  std::vector<uint32_t> found;
  for (int64_t first : {0, 1, 7})
    for (int64_t n = 0; n <= 300 - first; n++) {
      const Bytes part(x.begin() + first, x.begin() + first + n);  // so that what lies behind it is no one's
      const uint32_t one = k.crc32(5, part.data(), n);
      if (one != k.crc32(5, x.data() + first, n)) abort();
      found.push_back(one);
    }
  show("crc32", "u8", found.data(), 4 * found.size(), 1);
  // Two streams at once are as one and one; where the processor lacks instructions, nothing is touched.
  for (int64_t n : {0, 64, 192})
    for (int64_t m : {0, 64, 256}) {
      const Bytes first = codes(n), second = codes(m), states = codes(64);
      Bytes both = states, one = states;
      const auto state = [](Bytes& of, int i) { return (uint32_t*)of.data() + 8 * i; };
      const bool done = k.sha256(state(both, 0), first.data(), n, state(both, 1), second.data(), m);
      k.sha256(state(one, 0), first.data(), n, state(one, 1), nullptr, 0);
      k.sha256(state(one, 0), nullptr, 0, state(one, 1), second.data(), m);
      if (both != one || (both != states) != (done && n + m > 0)) abort();
    }
}
