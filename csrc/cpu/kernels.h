// The kernels of one instruction set. cpu/kernels.cpp is compiled once for each of them.
#pragma once
#include <stdint.h>

#include "../core/activation.h"
#include "../core/job.h"
#include "../core/norm.h"
#include "../core/random.h"
#include "../core/rotary.h"

namespace modelcenter {

// out (rows, columns) = a (rows, depth) @ b (depth, columns) + bias (columns,), or without a bias that much more; sums
// (rows,) are those of the rows of a. bias and sums may be null. The numbers of a row of out are next to each other; those
// of a and of b, or of their columns.
struct Product {
  float *out, *sums;
  const float *a, *b, *bias;
  int64_t columns, depth, out_stride, a_stride, b_stride;
  bool a_transposed, b_transposed, add;
};
using ProductKernel = void (*)(const Product&, int64_t top, int64_t bottom, int64_t left, int64_t right, float* scratch);
constexpr int64_t kProductScratch = 224 * 1024;  // numbers that a thread packs operands into

// Attention of packed sequences: out = dropout(softmax(capped(scale q k^T) + bias)) v. q, out: rows of `heads` times
// `channels` numbers; k, v: of `kv_heads` times `channels`. bias: (heads, bias_width), its middle for a key at the place of its
// query. sums: (queries, heads, 2), of each query the largest score and the sum of exponentials. window: a query sees
// keys less than so many places away; 0: all. cap: a score s is cap tanh(s / cap); 0: it stays as it is. tokens: the
// numbers of the queries, or null. draw: its threshold is 0 where nothing is dropped.
// By segments, if kinds is not null: tokens of some kinds see each other, in place of all others. kinds: of each token.
// rules: of the sequence at hand, (kinds, kinds), what a query of one kind makes of a key of another: -1: it does not
// see it; else twice a number, and one more where it only sees what is not after itself. The number is 0 where the bias
// is added, else 1 more than the place of what is added instead in segment_bias, (heads, segment_width).
// With distances, if tables is not null: scale (q k^T + what distances add) is in place of scale q k^T, and there are as
// many key heads as heads. of_keys, of_queries: (table_rows, heads times channels), the vectors that a query, or a key, is
// multiplied with, the middle row for a key at the place of its query; null: none. tables: what distances_begin makes of
// them in the memory of a thread, for sequences of up to `reach` tokens.
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

constexpr int64_t kSquared = 4;  // chunks whose squares are added up at the same time

using AttentionKernel = void (*)(const Attention&, int64_t query, int64_t queries, int64_t key, int64_t keys,
                                 int64_t group, float* scratch);
using AttentionBackwardKernel = void (*)(const Attention&, int64_t query, int64_t queries, int64_t key, int64_t keys,
                                         int64_t group, float* dbias, float* dsegment_bias, float* scratch);

struct CpuKernels {
  const char* name;
  // Steps elements [begin, end) of a slab; gradients are multiplied by `scale` first.
  void (*update[3])(const Slab&, const Types&, const Scalars&, float scale, uint32_t salt, int64_t begin, int64_t end);
  // AdamW with moments in 8 bits; begin and end count blocks.
  void (*update8)(const Slab&, const Types&, const Scalars&, float scale, uint32_t salt, int64_t begin, int64_t end);
  // The sum of squares of each chunk of n numbers, in double, in an order that depends on the chunk's size alone.
  void (*squares)(const void* x, int type, int64_t n, double* total);
  void (*cast)(void* out, int out_type, const void* in, int in_type, float scale, int64_t n);
  void (*split)(const float* x, uint16_t* high, int16_t* low, int64_t n);
  void (*merge)(const uint16_t* high, const int16_t* low, float* x, int64_t n);
  // out = residual + dropout(x) for channels [begin, end) of row i, where the pointers are; residual may be null.
  void (*dropout)(const Draw& draw, int64_t i, const void* x, const void* residual, void* out, int type, int64_t begin,
                  int64_t end);
  // Numbers [begin, end) of an activation, and of its gradients.
  void (*activation)(const ActivationJob& job, int64_t begin, int64_t end);
  void (*activation_backward)(const ActivationJob& job, int64_t begin, int64_t end);
  // Tokens [begin, end) of queries and keys, in fp32; `by` has room for half a head.
  void (*rotate)(const Rotation& job, int64_t begin, int64_t end, float* by);
  // Rows [begin, end) through a norm, and back, in fp32. The gradients of weight and bias are added to dweight and
  // dbias, unless dweight is null.
  void (*norm)(const NormJob& job, int64_t begin, int64_t end);
  void (*norm_backward)(const NormBackwardJob& job, float* dweight, float* dbias, int64_t begin, int64_t end);
  // The cross-entropy of rows of n logits, `stride` numbers apart: see loss.h.
  void (*cross_entropy)(float* x, int64_t stride, const int64_t* target, float* loss, int64_t rows, int64_t n,
                        float scale, float smoothing, bool train);
  // Rows [top, bottom) of columns [left, right) of a product. The sums are of whoever begins at column 0.
  ProductKernel product;
  // Columns [left, right) of a product of few rows, whose b is transposed and a is not, and of which no sums are asked
  // for; and up to how many rows it is the faster one.
  void (*product_of_few)(const Product&, int64_t rows, int64_t left, int64_t right);
  int64_t few_rows;
  // Queries of one sequence over its keys, of the heads that share a key head, and back: see attention.h.
  int64_t (*attention_scratch)(int64_t queries, int64_t keys, int64_t channels, bool backward, bool capped, bool rounded);
  AttentionKernel attention;
  AttentionBackwardKernel attention_backward;
  // A head's tables of distances, before sequences of it are attended, and the gradients of these after all of them, each
  // (2 * reach - 1, channels) or null; and how much memory they take: see distances.h.
  int64_t (*distances_scratch)(int64_t reach, int64_t channels, bool backward);
  void (*distances_begin)(const Attention&, int64_t head, bool backward);
  void (*distances_end)(const Attention&, float* dkeys, float* dqueries);
  // out (columns, rows) = the transpose of in (rows, columns), of numbers of 2, 4 or 8 bytes; strides are of rows.
  // `past_caches` is for an out that is not read soon.
  void (*transpose)(void* out, const void* in, int size, int64_t rows, int64_t columns, int64_t out_stride,
                    int64_t in_stride, bool past_caches);
  // Zeros for n bytes, and n bytes to where zeros are: pages are written only where they change.
  void (*clear_pages)(uint8_t* x, int64_t n);
  void (*copy_pages)(uint8_t* to, const uint8_t* x, int64_t n);
  uint32_t (*crc32)(uint32_t start, const uint8_t* x, int64_t n);
  // Two states of SHA-256 after n bytes of x and m of y, multiples of 64; false where the processor lacks instructions.
  bool (*sha256)(uint32_t* first, const uint8_t* x, int64_t n, uint32_t* second, const uint8_t* y, int64_t m);
};

// The same of numbers rounded to bf16 where they are multiplied (not where distances add to scores); null where this CPU
// has no instructions for it, or the compiler knows none.
struct RoundedKernels {
  ProductKernel product;
  AttentionKernel attention;
  AttentionBackwardKernel attention_backward;
};
const RoundedKernels* rounded();

const CpuKernels& kernels_plain();
const CpuKernels& kernels_avx2();
const CpuKernels& kernels_avx512();

// Whether this is a CPU of AMD's (measured on Zen 3). Others wait at the beginning of each page, so several arrays are
// asked for ahead of reading them; AMD's bring several faster by themselves, and only few of them faster if asked. And
// going backwards costs them more than what is left in the caches saves.
extern const bool kAmd;

// The widest that this CPU has and this library was compiled for; MODELCENTER_ISA=plain, avx2 or avx512 lowers it.
const CpuKernels& kernels();

// Denormals are zero on this thread while it lives: with them a moment that dies away costs 20 times the time.
class FlushDenormals {
 public:
  FlushDenormals();
  ~FlushDenormals();

 private:
  uint64_t before_;
};

}  // namespace modelcenter
