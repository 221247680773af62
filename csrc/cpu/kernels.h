// The kernels of one instruction set. cpu/kernels.cpp is compiled once for each of them.
#pragma once
#include <stdint.h>

#include "../core/activation.h"
#include "../core/job.h"
#include "../core/norm.h"
#include "../core/random.h"
#include "../core/rotary.h"

namespace modelcenter {

// out (rows, columns) = a (rows, depth) @ b (depth, columns) + bias (columns,), or added to out; sums (rows,): those of
// the rows of a. bias and sums may be null. The rows of out are contiguous; of a and of b, either rows or columns are.
struct Product {
  float *out, *sums;
  const float *a, *b, *bias;
  int64_t columns, depth, out_stride, a_stride, b_stride;
  bool a_transposed, b_transposed, add;
};
using ProductKernel = void (*)(const Product&, int64_t top, int64_t bottom, int64_t left, int64_t right, float* scratch);
constexpr int64_t kProductScratch = 224 * 1024;  // numbers in the memory into which a thread packs operands

// Attention of packed sequences: out = dropout(softmax(capped(scale q k^T) + bias)) v. q, out: rows of `heads` times
// `channels` numbers; k, v: of `kv_heads` times `channels`. bias: (heads, bias_width), the middle for a key at the
// place of its query. sums: (queries, heads, 2), the largest score of each query and the sum of its exponentials.
// window: a query sees keys less than this distance away; 0: all. cap: a score s becomes cap tanh(s / cap); 0: no cap.
// tokens: the token numbers of the queries, or null. draw: its threshold is 0 without dropout.
// With segments (kinds is not null), rules by the tokens' kinds replace the other masks. kinds: those of all tokens.
// rules: (kinds, kinds), those of the current sequence, by the kinds of query and key. -1: the query does not see the
// key. Otherwise 2 * number, plus 1 if the query only sees keys that are not after it; number is 0 to add the bias, or
// 1 + the column of segment_bias (heads, segment_width) that is added instead.
// With distances (tables is not null), scores are scale (q k^T + the terms of distances), and kv_heads equals heads.
// of_keys, of_queries: (table_rows, heads times channels), the vectors by which a query, or a key, is multiplied, with
// the middle row for a key at the place of its query; null: none. tables: made from them by distances_begin in the
// memory of a thread, for sequences of up to `reach` tokens.
struct Attention {
  const float *q, *k, *v, *bias, *grad;
  float *out, *sums, *dq, *dk, *dv;
  const int64_t* tokens;
  const int32_t *kinds, *rules;
  const float *segment_bias, *of_keys, *of_queries;
  float* tables;
  int64_t heads, kv_heads, channels, bias_width, window, first_head, num_kinds, segment_width, table_rows, reach;
  float scale, cap;
  bool causal;
  Draw draw;
};

constexpr int64_t kSquared = 4;  // chunks whose squares are summed at the same time

using AttentionKernel = void (*)(const Attention&, int64_t query, int64_t queries, int64_t key, int64_t keys,
                                 int64_t group, float* scratch);
using AttentionBackwardKernel = void (*)(const Attention&, int64_t query, int64_t queries, int64_t key, int64_t keys,
                                         int64_t group, float* dbias, float* dsegment_bias, float* scratch);

struct CpuKernels {
  const char* name;
  // Steps elements [begin, end) of a slab; gradients are multiplied by `scale` first.
  void (*update[3])(const Slab&, const Types&, const Scalars&, float scale, uint32_t salt, int64_t begin, int64_t end);
  // AdamW with 8-bit moments; begin and end count blocks.
  void (*update8)(const Slab&, const Types&, const Scalars&, float scale, uint32_t salt, int64_t begin, int64_t end);
  // The sum of squares of each chunk of n numbers, in double, in an order that depends only on the chunk's size.
  void (*squares)(const void* x, int type, int64_t n, double* total);
  void (*cast)(void* out, int out_type, const void* in, int in_type, float scale, int64_t n);
  void (*split)(const float* x, uint16_t* high, int16_t* low, int64_t n);
  void (*merge)(const uint16_t* high, const int16_t* low, float* x, int64_t n);
  // out = residual + dropout(x) for channels [begin, end) of row i, to which the pointers point; residual may be null.
  void (*dropout)(const Draw& draw, int64_t i, const void* x, const void* residual, void* out, int type, int64_t begin,
                  int64_t end);
  // Elements [begin, end) of an activation, and of its gradients.
  void (*activation)(const ActivationJob& job, int64_t begin, int64_t end);
  void (*activation_backward)(const ActivationJob& job, int64_t begin, int64_t end);
  // Tokens [begin, end) of queries and keys, in fp32; `by` has room for half a head.
  void (*rotate)(const Rotation& job, int64_t begin, int64_t end, float* by);
  // Rows [begin, end) of a norm, forward and backward, in fp32. The gradients of weight and bias are added to dweight
  // and dbias, unless dweight is null.
  void (*norm)(const NormJob& job, int64_t begin, int64_t end);
  void (*norm_backward)(const NormBackwardJob& job, float* dweight, float* dbias, int64_t begin, int64_t end);
  // The cross-entropy of rows of n logits, `stride` numbers apart: see loss.h.
  void (*cross_entropy)(float* x, int64_t stride, const int64_t* target, float* loss, int64_t rows, int64_t n,
                        float scale, float smoothing, bool train);
  // Rows [top, bottom) of columns [left, right) of a product. The call with left = 0 computes the sums.
  ProductKernel product;
  // Columns [left, right) of a product of few rows, with b transposed, a not, and without sums; and the number of rows
  // up to which it is the faster one: of a product alone, and of one of many that share the start of the threads.
  void (*product_of_few)(const Product&, int64_t rows, int64_t left, int64_t right);
  int64_t few_rows, few_rows_of_groups;
  // Attention of one sequence in the heads that share a key head, forward and backward: see attention.h.
  int64_t (*attention_scratch)(int64_t queries, int64_t keys, int64_t channels, bool backward, bool capped, bool rounded);
  AttentionKernel attention;
  AttentionBackwardKernel attention_backward;
  // Prepare a head's tables of distances before its sequences, and store their gradients, (2 * reach - 1, channels) or
  // null, after them; scratch: the memory that tables take. See distances.h.
  int64_t (*distances_scratch)(int64_t reach, int64_t channels, bool backward);
  void (*distances_begin)(const Attention&, int64_t head, bool backward);
  void (*distances_end)(const Attention&, float* dkeys, float* dqueries);
  // out (columns, rows) = the transpose of in (rows, columns), of numbers of 2, 4 or 8 bytes; strides are those of
  // rows. past_caches: bypass the caches, for an out that is not read soon.
  void (*transpose)(void* out, const void* in, int size, int64_t rows, int64_t columns, int64_t out_stride,
                    int64_t in_stride, bool past_caches);
  // Write n zero bytes; copy n bytes to zeros. Both write only pages that change.
  void (*clear_pages)(uint8_t* x, int64_t n);
  void (*copy_pages)(uint8_t* to, const uint8_t* x, int64_t n);
  uint32_t (*crc32)(uint32_t start, const uint8_t* x, int64_t n);
  // Advances two states of SHA-256 by n bytes of x and m of y, multiples of 64; false without instructions for it.
  bool (*sha256)(uint32_t* first, const uint8_t* x, int64_t n, uint32_t* second, const uint8_t* y, int64_t m);
};

// Kernels that round numbers to bf16 before they multiply (except terms of distances); null if this CPU has no
// instructions for it, or the compiler knows none.
struct RoundedKernels {
  ProductKernel product;
  AttentionKernel attention;
  AttentionBackwardKernel attention_backward;
};
const RoundedKernels* rounded();

const CpuKernels& kernels_plain();
const CpuKernels& kernels_avx2();
const CpuKernels& kernels_avx512();

// Whether this is an AMD CPU (measured on Zen 3). Others wait at the beginning of each page, so several arrays are
// prefetched; AMD's load several arrays faster by themselves, and only a few faster with prefetches. And going
// backwards costs them more than the data left in the caches saves.
extern const bool kAmd;

// The kernels of the widest instruction set of this CPU and library; MODELCENTER_ISA=plain, avx2 or avx512 lowers it.
const CpuKernels& kernels();

// Flushes denormals to zero on this thread while it exists: a moment that decays to denormals takes 20 times as long.
class FlushDenormals {
 public:
  FlushDenormals();
  ~FlushDenormals();

 private:
  uint64_t before_;
};

}  // namespace modelcenter
