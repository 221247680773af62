// Products of matrices with operands in place: checks of the arguments, and the division among threads.
#pragma once
#include <memory>
#include <vector>

#include "../core/arguments.h"
#include "kernels.h"

namespace modelcenter {
namespace {

inline Product check_product(const Tensor& out, const Tensor& a, const Tensor& b, const std::optional<Tensor>& sums,
                             const std::optional<Tensor>& bias, bool add) {
  Overlaps overlaps;
  auto take = [&](const Tensor& t, const char* name, int dims, bool written) {
    STD_TORCH_CHECK(t.dim() == dims && t.scalar_type() == ScalarType::Float, name, " must be an fp32 tensor of ", dims,
                    " dimensions");
    same_device(t, out, name);
    int64_t last = 0;
    for (int i = 0; i < dims; i++) last += (t.size(i) - 1) * t.stride(i);
    float* data = (float*)data_of(t, written);
    if (t.numel()) overlaps.add(data, 4 * (last + 1), written);
    return data;
  };
  Product p{};
  p.add = add;
  p.out = take(out, "out", 2, true);
  p.a = take(a, "a", 2, false);
  p.b = take(b, "b", 2, false);
  const int64_t rows = out.size(0);
  p.columns = out.size(1), p.depth = a.size(1);
  STD_TORCH_CHECK(a.size(0) == rows && b.size(0) == p.depth && b.size(1) == p.columns, "out (", rows, ", ", p.columns,
                  ") is not the size of a (", a.size(0), ", ", p.depth, ") @ b (", b.size(0), ", ", b.size(1), ")");
  p.out_stride = out.stride(0);
  contiguous_rows(out, "out");
  p.b_transposed = b.stride(1) != 1 && b.size(1) != 1;
  STD_TORCH_CHECK(!p.b_transposed || b.stride(0) == 1 || p.depth == 1, "neither rows nor columns of b are contiguous");
  p.a_transposed = a.stride(0) == 1 && a.stride(1) != 1;  // columns may be the same memory, in the gradient of a sum
  STD_TORCH_CHECK(p.a_transposed || a.stride(1) == 1 || p.depth == 1, "neither rows nor columns of a are contiguous");
  p.a_stride = a.stride(p.a_transposed ? 1 : 0), p.b_stride = b.stride(p.b_transposed ? 1 : 0);
  if (sums) {
    p.sums = take(*sums, "sums", 1, true);
    STD_TORCH_CHECK(sums->numel() == rows && sums->is_contiguous(), "sums must be contiguous, with ", rows, " numbers");
  }
  if (bias) {
    p.bias = take(*bias, "bias", 1, false);
    STD_TORCH_CHECK(!add, "a product is added to what is there, or to a bias");
    STD_TORCH_CHECK(bias->numel() == p.columns && bias->is_contiguous(), "bias must be contiguous, with ", p.columns,
                    " numbers");
  }
  overlaps.check();
  return p;
}

// Into how many parts the rows are cut, of `threads` parts in all: as square as possible, to pack the least.
int64_t cuts(int64_t rows, int64_t columns, int64_t threads) {
  int64_t best = 1;
  auto edge = [&](int64_t n) { return (double)rows / (double)n + (double)columns / (double)(threads / n); };
  for (int64_t n = 2; n <= threads; n++)
    if (threads % n == 0 && edge(n) < edge(best)) best = n;
  return best;
}

constexpr int64_t kPaying = 1 << 15;  // multiplications that are worth starting a thread

// The rows of b are divided among the threads; the bits do not depend on their number.
void multiply_few(const Product& p, int64_t rows, int64_t part, int64_t parts) {
  constexpr int64_t kTogether = 4;  // columns
  const int64_t groups = (p.columns + kTogether - 1) / kTogether;
  auto edge = [&](int64_t i) { return std::min(p.columns, groups * i / parts * kTogether); };
  if (edge(part) < edge(part + 1)) kernels().product_of_few(p, rows, edge(part), edge(part + 1));
}

// One of `parts` parts of whole tiles, with the same bits for any number of parts.
void multiply_part(const Product& p, int64_t rows, int64_t part, int64_t parts, ProductKernel kernel) {
  static thread_local std::unique_ptr<float[]> scratch(new float[kProductScratch]);
  constexpr int64_t kTile = 32;
  const int64_t down = cuts(rows, p.columns, parts), across = parts / down;
  auto edge = [](int64_t i, int64_t parts, int64_t n) {
    return std::min(n, ((n + kTile - 1) / kTile * i + parts - 1) / parts * kTile);
  };
  const int64_t r = part / across, c = part % across;
  const int64_t top = edge(r, down, rows), left = edge(c, across, p.columns);
  kernel(p, top, edge(r + 1, down, rows), left, edge(c + 1, across, p.columns), scratch.get());
}

// The result if nothing is summed.
void clear(const Product& p, int64_t rows) {
  if (!p.add)
    for (int64_t i = 0; i < rows; i++) memset(p.out + i * p.out_stride, 0, sizeof(float) * (size_t)p.columns);
  if (p.sums) memset(p.sums, 0, sizeof(float) * (size_t)rows);
}

ProductKernel product_kernel(bool may_round) {
  return may_round && rounded() ? rounded()->product : kernels().product;
}

// Calls one(part, parts) for each part, in threads of its own if `work` multiplications are worth it.
template <class One>
void in_parts(int64_t work, int64_t most, const One& one) {
  const int64_t parts = std::max<int64_t>(1, std::min(most, work / kPaying));
  torch::stable::parallel_for(0, parts, 1, [&](int64_t begin, int64_t end) {
    FlushDenormals flush;
    for (int64_t i = begin; i < end; i++) one(i, parts);
  });
}

bool without_packing(const Product& p) { return p.b_transposed && !p.a_transposed && !p.add && !p.sums; }

void multiply(const Tensor& out, const Tensor& a, const Tensor& b, const std::optional<Tensor>& sums,
              const std::optional<Tensor>& bias, bool add, bool may_round) {
  const Product p = check_product(out, a, b, sums, bias, add);
  const int64_t rows = out.size(0), threads = torch::stable::get_num_threads();
  if (p.depth == 0) return clear(p, rows);
  if (!rows || (!p.columns && !p.sums)) return;
  if (without_packing(p) && rows <= kernels().few_rows)
    return in_parts(rows * p.columns * p.depth, std::min<int64_t>(threads, (p.columns + 3) / 4),
                    [&](int64_t part, int64_t parts) { multiply_few(p, rows, part, parts); });
  const ProductKernel kernel = product_kernel(may_round);
  in_parts(threads * kPaying, threads,
           [&](int64_t part, int64_t parts) { multiply_part(p, rows, part, parts, kernel); });
}

// Products of groups of rows, or of groups of what is summed, all in one start of the threads. `ends`: int32, the end of
// each group; the first begins at 0, and one may be empty.
//
//   out (n, c) = a (n, k) @ b[g] (k, c) for the rows of each group g of b (groups, k, c); or
//   out[g] (m, c) = a (m, n) @ b (n, c) over the columns of a in each group g of out (groups, m, c)
void grouped_product(Tensor out, Tensor a, Tensor b, Tensor ends, bool add, bool may_round) {
  const bool by_rows = out.dim() == 2;
  STD_TORCH_CHECK(by_rows ? b.dim() == 3 : out.dim() == 3, "out or b must have a dimension of groups");
  const Tensor& grouped = by_rows ? b : out;
  const int64_t groups = grouped.size(0), step = grouped.stride(0);
  STD_TORCH_CHECK(ends.dim() == 1 && ends.scalar_type() == ScalarType::Int && ends.is_contiguous(),
                  "ends must be a contiguous int32 tensor of one dimension");
  same_device(ends, out, "ends");
  STD_TORCH_CHECK(groups > 0 && ends.numel() == groups, "ends has ", ends.numel(), " numbers for ", groups, " groups");
  const Product whole = by_rows ? check_product(out, a, torch::stable::select(b, 0, 0), std::nullopt, std::nullopt, add)
                                : check_product(torch::stable::select(out, 0, 0), a, b, std::nullopt, std::nullopt, add);
  const int64_t n = by_rows ? out.size(0) : whole.depth;
  const int32_t* const end = (const int32_t*)data_of(ends, false);
  struct Group {
    Product p;
    int64_t rows;
  };
  std::vector<Group> found;
  int64_t start = 0;
  for (int64_t g = 0; g < groups; start = end[g++]) {
    STD_TORCH_CHECK(end[g] >= start && end[g] <= n, "ends must not decrease, and end at ", n);
    Group one{whole, by_rows ? end[g] - start : out.size(1)};
    if (by_rows) one.p.out += start * whole.out_stride, one.p.b += g * step;
    else one.p.out += g * step, one.p.b += start * (whole.b_transposed ? 1 : whole.b_stride);
    one.p.a += start * (by_rows == whole.a_transposed ? 1 : whole.a_stride);
    if (!by_rows) one.p.depth = end[g] - start;
    if (one.p.depth == 0) clear(one.p, one.rows);
    else if (one.rows && one.p.columns) found.push_back(one);
  }
  STD_TORCH_CHECK(start == n, "ends must not decrease, and end at ", n);
  const ProductKernel kernel = product_kernel(may_round);
  in_parts(n * whole.columns * (by_rows ? whole.depth : out.size(1)), torch::stable::get_num_threads(),
           [&](int64_t part, int64_t parts) {
             for (const Group& one : found)
               if (without_packing(one.p) && one.rows <= kernels().few_rows_of_groups)
                 multiply_few(one.p, one.rows, part, parts);
               else
                 multiply_part(one.p, one.rows, part, parts, kernel);
           });
}

// may_round: numbers may be rounded to bf16 before they are multiplied, if that is faster.
void product(Tensor out, Tensor a, Tensor b, std::optional<Tensor> sums, bool add, bool may_round) {
  multiply(out, a, b, sums, std::nullopt, add, may_round);
}

// out (m, n) = x (m, k) @ weight (n, k).T + bias (n,).
void linear_into(Tensor out, Tensor x, Tensor weight, std::optional<Tensor> bias, bool may_round) {
  STD_TORCH_CHECK(x.dim() == 2 && weight.dim() == 2 && x.size(1) > 0, "x and weight must be matrices with columns");
  multiply(out, x, torch::stable::transpose(weight, 0, 1), std::nullopt, bias, false, may_round);
}

Tensor linear(Tensor x, Tensor weight, std::optional<Tensor> bias, bool may_round) {
  const Tensor out = torch::stable::new_empty(x, {x.size(0), weight.size(0)});
  linear_into(out, x, weight, bias, may_round);
  return out;
}

}  // namespace
}  // namespace modelcenter
