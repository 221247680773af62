// Products of matrices with operands in place: checks of the arguments, and the division among threads.
#pragma once
#include <memory>

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

// The rows of b are divided among the threads; the bits do not depend on their number.
void multiply_few(const Product& p, int64_t rows) {
  constexpr int64_t kTogether = 4, kPaying = 1 << 15;  // columns; multiplications that are worth starting a thread
  const int64_t groups = (p.columns + kTogether - 1) / kTogether;
  const int64_t most = std::min<int64_t>(groups, torch::stable::get_num_threads());
  const int64_t parts = std::max<int64_t>(1, std::min(most, rows * p.columns * p.depth / kPaying));
  auto edge = [&](int64_t i) { return std::min(p.columns, groups * i / parts * kTogether); };
  torch::stable::parallel_for(0, parts, 1, [&](int64_t begin, int64_t end) {
    FlushDenormals flush;
    kernels().product_of_few(p, rows, edge(begin), edge(end));
  });
}

void multiply(const Tensor& out, const Tensor& a, const Tensor& b, const std::optional<Tensor>& sums,
              const std::optional<Tensor>& bias, bool add, bool may_round) {
  Product p = check_product(out, a, b, sums, bias, add);
  const int64_t rows = out.size(0);
  if (!add && p.depth == 0)
    for (int64_t i = 0; i < rows; i++) memset(p.out + i * p.out_stride, 0, sizeof(float) * (size_t)p.columns);
  if (p.depth == 0 && p.sums) memset(p.sums, 0, sizeof(float) * (size_t)rows);
  if (!rows || p.depth == 0 || (!p.columns && !p.sums)) return;
  const ProductKernel kernel = may_round && rounded() ? rounded()->product : kernels().product;
  const bool taken = p.b_transposed && !p.a_transposed && !p.add && !p.sums;
  if (taken && rows <= kernels().few_rows) return multiply_few(p, rows);
  // Cut into parts of whole tiles, one per thread, with the same bits for any number of threads.
  constexpr int64_t kTile = 32;
  const int64_t threads = torch::stable::get_num_threads();
  const int64_t down = cuts(rows, p.columns, threads), across = threads / down;
  auto edge = [](int64_t i, int64_t parts, int64_t n) {
    return std::min(n, ((n + kTile - 1) / kTile * i + parts - 1) / parts * kTile);
  };
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    static thread_local std::unique_ptr<float[]> scratch(new float[kProductScratch]);
    FlushDenormals flush;
    for (int64_t i = begin; i < end; i++) {
      const int64_t r = i / across, c = i % across;
      const int64_t top = edge(r, down, rows), left = edge(c, across, p.columns);
      kernel(p, top, edge(r + 1, down, rows), left, edge(c + 1, across, p.columns), scratch.get());
    }
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
