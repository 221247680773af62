// The operators' schemas, for all devices, and their CPU side. Stable ABI: one library for torch 2.11 and later.
#include <math.h>

#include "../core/activation_arguments.h"
#include "../core/norm_arguments.h"
#include "../core/rotary_arguments.h"
#include "arrays.h"
#include "bind_attention.h"
#include "bind_bytes.h"
#include "bind_distances.h"
#include "bind_products.h"
#include "kernels.h"

namespace modelcenter {
namespace {

constexpr int64_t kStreamed = 1 << 23;  // parameters in one call whose states no longer fit the caches

// Cuts tensors of these sizes into chunks and runs body(tensor, begin, end) for each, in one parallel region.
// backwards: each thread begins with its last chunk.
template <class Sizes, class Body>
void for_chunks(size_t count, const Sizes& size, const Body& body, int64_t chunk = kChunk, bool backwards = false) {
  std::vector<int64_t> first(count + 1, 0);
  for (size_t i = 0; i < count; i++) first[i + 1] = first[i] + (size(i) + chunk - 1) / chunk;
  torch::stable::parallel_for(0, first[count], 2, [&](int64_t begin, int64_t end) {
    FlushDenormals flush;
    size_t t = std::upper_bound(first.begin(), first.end(), backwards ? end - 1 : begin) - first.begin() - 1;
    for (int64_t k = begin; k < end; k++) {
      const int64_t c = backwards ? begin + end - 1 - k : k;
      while (first[t + 1] <= c) t++;
      while (first[t] > c) t--;
      const int64_t from = (c - first[t]) * chunk;
      body(t, from, std::min(from + chunk, (int64_t)size(t)));
    }
  });
}

void step(int rule, const Tensors& p, const Tensors& g, const Tensors& m, const Tensors& v, const Tensors& aux,
          const Tensors& steps, const std::optional<Tensor>& gscale, const std::optional<Tensor>& found_inf,
          const Settings& settings, int64_t mode, const std::vector<int64_t>& places, const Scales& scales, int64_t) {
  if (p.empty()) return;
  Call call = lay_out(p, g, m, v, aux, steps, rule, mode, places, scales);
  int64_t numbers = 0;
  for (const Slab& slab : call.slabs) numbers += slab.n;
  call.types.stream = numbers >= kStreamed;
  const float* factor = scalar(gscale, p[0], "gscale");
  const float* skip = scalar(found_inf, p[0], "found_inf");
  if (skip && *skip != 0.0f) return;
  const float scale = factor ? *factor : 1.0f;
  std::vector<Scalars> scalars(p.size());
  std::vector<uint32_t> salts(p.size());
  float last = -1.0f;
  for (size_t i = 0; i < p.size(); i++) {
    const Slab& slab = call.slabs[i];
    const float now = *slab.step += 1.0f;
    if (i && now == last) {
      scalars[i] = scalars[i - 1];
    } else if (rule == kAdamW || rule == kAdamW8) {
      scalars[i] = AdamW::scalars(settings, now);
    } else {
      scalars[i] = rule == kLion ? Lion::scalars(settings, now) : Momentum::scalars(settings, now);
    }
    last = now;
    salts[i] = mix(mix((uint32_t)slab.place.key) ^ (uint32_t)(int64_t)now);
  }
  if (rule == kAdamW8) {
    const auto blocks = [&](size_t i) { return scales.m[i].numel(); };
    for_chunks(p.size(), blocks, [&](size_t i, int64_t begin, int64_t end) {
      kernels().update8(call.slabs[i], call.types, scalars[i], scale, salts[i], begin, end);
    }, kChunk / kQuantBlock);
    return;
  }
  // If there is a factor, an earlier pass over the gradients has left the last ones in the caches, so the step goes
  // backwards. Otherwise the order of memory is a little faster.
  const auto update = kernels().update[rule];
  for_chunks(p.size(), [&](size_t i) { return call.slabs[i].n; }, [&](size_t i, int64_t begin, int64_t end) {
    update(call.slabs[i], call.types, scalars[i], scale, salts[i], begin, end);
  }, kChunk, factor && !kAmd);
}

void grad_norm_sq(Tensors g, Tensor out, int64_t) {
  STD_TORCH_CHECK(out.numel() == 1 && out.scalar_type() == ScalarType::Double, "out must be one fp64 number");
  std::vector<int64_t> sizes(g.size()), first(g.size() + 1, 0);
  std::vector<int> types(g.size());
  std::vector<const char*> data(g.size());
  for (size_t i = 0; i < g.size(); i++) {
    STD_TORCH_CHECK(g[i].is_contiguous(), "g[", (int64_t)i, "] is not contiguous");
    same_device(g[i], out, "g");
    types[i] = type_of(g[i], "g");
    sizes[i] = g[i].numel();
    data[i] = (const char*)g[i].const_data_ptr();
    first[i + 1] = first[i] + (sizes[i] + kChunk - 1) / kChunk;
  }
  // One sum per chunk, added in order, so that the result does not depend on the threads.
  std::vector<double> sums((size_t)first[g.size()], 0.0);
  for_chunks(g.size(), [&](size_t i) { return sizes[i]; }, [&](size_t i, int64_t begin, int64_t end) {
    const char* from = data[i] + begin * size_of(types[i]);
    kernels().squares(from, types[i], end - begin, &sums[(size_t)(first[i] + begin / kChunk)]);
  }, kSquared * kChunk);
  double total = 0.0;
  for (double sum : sums) total += sum;
  *(double*)out.mutable_data_ptr() = total;
}

void clip_coef(Tensor norm_sq, std::optional<Tensor> loss_scale, double max_norm, double eps, Tensor norm,
               Tensor gscale, Tensor found_inf, int64_t) {
  STD_TORCH_CHECK(norm_sq.numel() == 1 && norm_sq.scalar_type() == ScalarType::Double,
                  "norm_sq must be one fp64 number");
  const float* scale = scalar(loss_scale, norm_sq, "loss_scale");
  float* out[3];
  const Tensor* outs[3] = {&norm, &gscale, &found_inf};
  for (int i = 0; i < 3; i++) out[i] = scalar(*outs[i], norm_sq, "an output", true);
  coefficients(*(const double*)norm_sq.const_data_ptr(), scale ? *scale : 1.0f, max_norm, eps, out[0], out[1], out[2]);
}

void cast_scale_copy(Tensors out, Tensors in, std::optional<Tensor> scale, int64_t) {
  if (out.empty() && in.empty()) return;
  check_cast(out, in);
  const float* factor = scalar(scale, out[0], "scale");
  for_chunks(out.size(), [&](size_t i) { return out[i].numel(); }, [&](size_t i, int64_t begin, int64_t end) {
    const int to = type_of(out[i], "out"), from = type_of(in[i], "in");
    kernels().cast((char*)out[i].mutable_data_ptr() + begin * size_of(to), to,
                   (const char*)in[i].const_data_ptr() + begin * size_of(from), from, factor ? *factor : 1.0f,
                   end - begin);
  });
}

void split_master(Tensors master, Tensors p, Tensors low, int64_t) {
  check_split(master, p, low);
  for_chunks(p.size(), [&](size_t i) { return p[i].numel(); }, [&](size_t i, int64_t begin, int64_t end) {
    kernels().split((const float*)master[i].const_data_ptr() + begin, (uint16_t*)p[i].mutable_data_ptr() + begin,
                    (int16_t*)low[i].mutable_data_ptr() + begin, end - begin);
  });
}

void merge_master(Tensors p, Tensors low, Tensors master, int64_t) {
  check_split(master, p, low);
  for_chunks(p.size(), [&](size_t i) { return p[i].numel(); }, [&](size_t i, int64_t begin, int64_t end) {
    kernels().merge((const uint16_t*)p[i].const_data_ptr() + begin, (const int16_t*)low[i].const_data_ptr() + begin,
                    (float*)master[i].mutable_data_ptr() + begin, end - begin);
  });
}

void dropout(Tensor out, Tensor x, std::optional<Tensor> residual, std::optional<Tensor> tokens, int64_t first_token,
             int64_t first_channel, int64_t key, int64_t site, int64_t threshold, int64_t) {
  const Draw draw = check_dropout(out, x, residual, tokens, first_token, first_channel, key, site, threshold);
  const int64_t rows = x.size(0), channels = x.size(1), type = type_of(x, "x");
  if (!x.numel()) return;
  char* to = (char*)out.mutable_data_ptr();
  const char* from = (const char*)x.const_data_ptr();
  const char* add = residual ? (const char*)residual->const_data_ptr() : nullptr;
  const int64_t size = size_of((int)type);
  // Long rows are cut, so that even a single row occupies all threads; short ones are taken several at a time.
  const int64_t parts = (channels + kChunk - 1) / kChunk, grain = std::max((int64_t)1, 2 * kChunk / channels);
  torch::stable::parallel_for(0, rows * parts, grain, [&](int64_t begin, int64_t end) {
    FlushDenormals flush;
    for (int64_t c = begin; c < end; c++) {
      const int64_t row = c / parts, at = c % parts * kChunk, offset = row * channels * size;
      kernels().dropout(draw, row, from + offset, add ? add + offset : nullptr, to + offset, (int)type, at,
                        std::min(at + kChunk, channels));
    }
  });
}

void activation(const ActivationJob& job, const Tensor&, int64_t) {
  STD_TORCH_CHECK(job.type == kFloat, "x must hold fp32 numbers");
  for_chunks(1, [&](size_t) { return job.rows * job.n; }, [&](size_t, int64_t begin, int64_t end) {
    kernels().activation(job, begin, end);
  });
}

void activation_backward(const ActivationJob& job, const Tensor&, const Tensor& total, int64_t) {
  STD_TORCH_CHECK(job.type == kFloat, "x must hold fp32 numbers");
  STD_TORCH_CHECK(total.numel() == 0, "on a CPU products add up the gradient of a bias, expected sums=False");
  for_chunks(1, [&](size_t) { return job.rows * job.n; }, [&](size_t, int64_t begin, int64_t end) {
    kernels().activation_backward(job, begin, end);
  });
}

void rotate(const Rotation& job, const Tensor&, int64_t) {
  STD_TORCH_CHECK(job.type == kFloat, "q must hold fp32 numbers");
  const int64_t width = std::max((int64_t)1, (job.q.count + job.k.count) * job.head_dim);
  for_chunks(1, [&](size_t) { return job.tokens; }, [&](size_t, int64_t begin, int64_t end) {
    std::vector<float> by((size_t)job.half);
    kernels().rotate(job, begin, end, by.data());
  }, std::max((int64_t)1, kChunk / width));
}

constexpr int64_t kRows = 32;  // rows that a thread takes at a time; dweight is summed in units of this size

void norm(const NormJob& job, const Tensor&, int64_t) {
  STD_TORCH_CHECK(job.type == kFloat, "x must hold fp32 numbers");
  for_chunks(1, [&](size_t) { return job.rows; }, [&](size_t, int64_t begin, int64_t end) {
    kernels().norm(job, begin, end);
  }, kRows);
}

void norm_backward(const NormBackwardJob& job, const Tensor&, int64_t) {
  STD_TORCH_CHECK(job.type == kFloat, "x must hold fp32 numbers");
  const int64_t n = job.n, parts = (job.rows + kRows - 1) / kRows, width = (job.dbias ? 2 : 1) * n;
  std::vector<float> part(job.dweight ? (size_t)(parts * width) : 0, 0.0f);
  for_chunks(1, [&](size_t) { return job.rows; }, [&](size_t, int64_t begin, int64_t end) {
    float* const own = job.dweight ? part.data() + begin / kRows * width : nullptr;
    kernels().norm_backward(job, own, own ? own + n : nullptr, begin, end);
  }, kRows);
  float* const sums[2] = {(float*)job.dweight, (float*)job.dbias};
  for (int which = 0; which < 2; which++) {
    if (!sums[which]) continue;
    memset(sums[which], 0, sizeof(float) * (size_t)n);
    for (int64_t p = 0; p < parts; p++)
      for (int64_t i = 0; i < n; i++) sums[which][i] += part[(size_t)(p * width + which * n + i)];
  }
}

constexpr int64_t kWidened = 8;  // rows of 16-bit logits per chunk, which share memory for one row in fp32

void cross_entropy(Tensor logits, Tensor loss, Tensor targets, std::optional<Tensor> count, double scale,
                   double smoothing, bool train, int64_t) {
  const LossCall call = check_loss(logits, loss, targets, count);
  const int64_t n = call.classes;
  for (int64_t i = 0; i < call.rows; i++)
    STD_TORCH_CHECK(call.targets[i] >= 0 && call.targets[i] < n, "target ", call.targets[i], " of row ", i,
                    " is none of ", n, " classes");
  const float times = (float)(call.count ? scale / (double)*call.count : scale), smooth = (float)smoothing;
  const auto rows = [&](size_t) { return call.rows; };
  if (call.type == kFloat) {
    for_chunks(1, rows, [&](size_t, int64_t begin, int64_t end) {
      kernels().cross_entropy((float*)call.logits + begin * call.stride, call.stride, call.targets + begin,
                              call.loss + begin, end - begin, n, times, smooth, train);
    }, 1);
    return;
  }
  for_chunks(1, rows, [&](size_t, int64_t begin, int64_t end) {
    std::vector<float> wide((size_t)n);
    for (int64_t i = begin; i < end; i++) {
      uint16_t* x = (uint16_t*)call.logits + i * call.stride;
      kernels().cast(wide.data(), kFloat, x, call.type, 1.0f, n);
      kernels().cross_entropy(wide.data(), n, call.targets + i, call.loss + i, 1, n, times, smooth, train);
      if (train) kernels().cast(x, call.type, wide.data(), kFloat, 1.0f, n);
    }
  }, kWidened);
}

}  // namespace
}  // namespace modelcenter

// The name of the instruction set in use; plain C, for Python's ctypes.
extern "C" __attribute__((visibility("default"))) const char* modelcenter_isa() { return modelcenter::kernels().name; }
extern "C" __attribute__((visibility("default"))) int modelcenter_rounds() {
  return modelcenter::rounded() != nullptr;
}

STABLE_TORCH_LIBRARY(modelcenter, m) {
  m.def(
      "adamw_(Tensor(a!)[] p, Tensor[] g, Tensor(b!)[] m, Tensor(c!)[] v, Tensor(d!)[] aux, Tensor(e!)[] step, "
      "Tensor? gscale, Tensor? found_inf, float lr, float beta1, float beta2, float eps, float weight_decay, "
      "int mode, int[] places, int stream) -> ()");
  m.def(
      "adamw8_(Tensor(a!)[] p, Tensor[] g, Tensor(b!)[] m, Tensor(c!)[] v, Tensor(f!)[] m_scale, Tensor(g!)[] v_scale, "
      "Tensor(d!)[] aux, Tensor(e!)[] step, Tensor? gscale, Tensor? found_inf, float lr, float beta1, float beta2, "
      "float eps, float weight_decay, int[] widths, int mode, int[] places, int stream) -> ()");
  m.def(
      "lion_(Tensor(a!)[] p, Tensor[] g, Tensor(b!)[] m, Tensor(d!)[] aux, Tensor(e!)[] step, Tensor? gscale, "
      "Tensor? found_inf, float lr, float beta1, float beta2, float weight_decay, int mode, int[] places, "
      "int stream) -> ()");
  m.def(
      "sgdm_(Tensor(a!)[] p, Tensor[] g, Tensor(b!)[] m, Tensor(d!)[] aux, Tensor(e!)[] step, Tensor? gscale, "
      "Tensor? found_inf, float lr, float momentum, float weight_decay, bool nesterov, int mode, int[] places, "
      "int stream) -> ()");
  m.def("grad_norm_sq(Tensor[] g, Tensor(a!) out, int stream) -> ()");
  m.def(
      "clip_coef_(Tensor norm_sq, Tensor? loss_scale, float max_norm, float eps, Tensor(a!) norm, Tensor(b!) gscale, "
      "Tensor(c!) found_inf, int stream) -> ()");
  m.def("cast_scale_copy_(Tensor(a!)[] out, Tensor[] input, Tensor? scale, int stream) -> ()");
  m.def("split_master_(Tensor[] master, Tensor(a!)[] p, Tensor(b!)[] remainder, int stream) -> ()");
  m.def(
      "dropout_(Tensor(a!) out, Tensor x, Tensor? residual, Tensor? tokens, int first_token, int first_channel, "
      "int key, int site, int threshold, int stream) -> ()");
  m.def("activation(Tensor x, Tensor? up, int kind, int stream) -> Tensor");
  m.def(
      "activation_backward(Tensor grad, Tensor x, Tensor? up, int kind, bool sums, int stream) "
      "-> (Tensor, Tensor, Tensor)");
  m.def(
      "norm(Tensor x, Tensor weight, Tensor? bias, float eps, Tensor? branch, Tensor? tokens, int key, int site, "
      "int threshold, int stream) -> (Tensor, Tensor, Tensor)");
  m.def(
      "norm_backward(Tensor grad, Tensor? extra, bool extra_of_sum, Tensor sum, Tensor weight, Tensor stats, "
      "bool centered, bool sums, Tensor? tokens, int key, int site, int threshold, int stream) "
      "-> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "cross_entropy_(Tensor(a!) logits, Tensor(b!) loss, Tensor targets, Tensor? count, float scale, float smoothing, "
      "bool train, int stream) -> ()");
  m.def("product_(Tensor(a!) out, Tensor a, Tensor b, Tensor(b!)? sums, bool add, bool may_round=False) -> ()");
  m.def("grouped_product_(Tensor(a!) out, Tensor a, Tensor b, Tensor ends, bool add, bool may_round=False) -> ()");
  m.def("linear_(Tensor(a!) out, Tensor x, Tensor weight, Tensor? bias, bool may_round=False) -> ()");
  m.def("linear(Tensor x, Tensor weight, Tensor? bias, bool may_round=False) -> Tensor");
  m.def(
      "attention_(Tensor(a!) out, Tensor(b!) sums, Tensor q, Tensor k, Tensor v, Tensor cu_queries, Tensor cu_keys, "
      "Tensor? bias, Tensor? tokens, int heads, int kv_heads, float scale, bool causal, int window, float cap, "
      "bool may_round, int key, int site, int first_head, int threshold, Tensor? kinds=None, Tensor? rules=None, "
      "Tensor? counts=None, Tensor? segment_bias=None) -> ()");
  m.def(
      "attention_backward_(Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, Tensor(d!)? dbias, Tensor grad, Tensor out, "
      "Tensor sums, Tensor q, Tensor k, Tensor v, Tensor cu_queries, Tensor cu_keys, Tensor? bias, Tensor? tokens, "
      "int heads, int kv_heads, float scale, bool causal, int window, float cap, bool may_round, int key, int site, "
      "int first_head, int threshold, Tensor? kinds=None, Tensor? rules=None, Tensor? counts=None, "
      "Tensor? segment_bias=None, Tensor(e!)? dsegment_bias=None) -> ()");
  m.def(
      "attention_by_distances_(Tensor(a!) out, Tensor(b!) sums, Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, "
      "Tensor? of_keys, Tensor? of_queries, Tensor? tokens, int heads, float scale, bool causal, int window, int key, "
      "int site, int first_head, int threshold) -> ()");
  m.def(
      "attention_by_distances_backward_(Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, Tensor(d!)? dkeys, "
      "Tensor(e!)? dqueries, Tensor grad, Tensor out, Tensor sums, Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, "
      "Tensor? of_keys, Tensor? of_queries, Tensor? tokens, int heads, float scale, bool causal, int window, int key, "
      "int site, int first_head, int threshold) -> ()");
  m.def("transpose_(Tensor(a!) out, Tensor input, bool past_caches) -> ()");
  m.def("clear_pages_(Tensor(a!) x) -> ()");
  m.def("copy_pages_(Tensor(a!) out, Tensor x) -> ()");
  m.def("crc32(Tensor x, int start) -> int");
  m.def("sha256_(Tensor(a!) first, Tensor x, Tensor(b!) second, Tensor y) -> bool");
  m.def("count_to_(Tensor(a!) counter, int value) -> ()");
  m.def("count_reached(Tensor counter, int value, int milliseconds) -> bool");
  m.def("merge_master_(Tensor[] p, Tensor[] remainder, Tensor(a!)[] master, int stream) -> ()");
  m.def(
      "rotate(Tensor q, Tensor k, Tensor cos, Tensor sin, int head_dim, bool interleaved, bool back, int stream)"
      " -> (Tensor, Tensor)");
  // CUDA only.
  m.def("column_sums(Tensor x, int stream) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(modelcenter, CPU, m) {
  m.impl("adamw_", TORCH_BOX(&modelcenter::adamw<modelcenter::step>));
  m.impl("adamw8_", TORCH_BOX(&modelcenter::adamw8<modelcenter::step>));
  m.impl("lion_", TORCH_BOX(&modelcenter::lion<modelcenter::step>));
  m.impl("sgdm_", TORCH_BOX(&modelcenter::momentum<modelcenter::step>));
  m.impl("grad_norm_sq", TORCH_BOX(&modelcenter::grad_norm_sq));
  m.impl("clip_coef_", TORCH_BOX(&modelcenter::clip_coef));
  m.impl("cast_scale_copy_", TORCH_BOX(&modelcenter::cast_scale_copy));
  m.impl("split_master_", TORCH_BOX(&modelcenter::split_master));
  m.impl("dropout_", TORCH_BOX(&modelcenter::dropout));
  m.impl("activation", TORCH_BOX(&modelcenter::activation_operator<modelcenter::activation>));
  m.impl("activation_backward",
         TORCH_BOX(&modelcenter::activation_backward_operator<modelcenter::activation_backward>));
  m.impl("norm", TORCH_BOX(&modelcenter::norm_operator<modelcenter::norm>));
  m.impl("norm_backward", TORCH_BOX(&modelcenter::norm_backward_operator<modelcenter::norm_backward>));
  m.impl("rotate", TORCH_BOX(&modelcenter::rotate_operator<modelcenter::rotate>));
  m.impl("cross_entropy_", TORCH_BOX(&modelcenter::cross_entropy));
  m.impl("product_", TORCH_BOX(&modelcenter::product));
  m.impl("grouped_product_", TORCH_BOX(&modelcenter::grouped_product));
  m.impl("linear_", TORCH_BOX(&modelcenter::linear_into));
  m.impl("linear", TORCH_BOX(&modelcenter::linear));
  m.impl("attention_", TORCH_BOX(&modelcenter::attention));
  m.impl("attention_backward_", TORCH_BOX(&modelcenter::attention_backward));
  m.impl("attention_by_distances_", TORCH_BOX(&modelcenter::attention_by_distances));
  m.impl("attention_by_distances_backward_", TORCH_BOX(&modelcenter::attention_by_distances_backward));
  m.impl("transpose_", TORCH_BOX(&modelcenter::transpose));
  m.impl("clear_pages_", TORCH_BOX(&modelcenter::clear_pages));
  m.impl("copy_pages_", TORCH_BOX(&modelcenter::copy_pages));
  m.impl("crc32", TORCH_BOX(&modelcenter::checksum));
  m.impl("sha256_", TORCH_BOX(&modelcenter::sha256_states));
  m.impl("count_to_", TORCH_BOX(&modelcenter::count_to));
  m.impl("count_reached", TORCH_BOX(&modelcenter::count_reached));
  m.impl("merge_master_", TORCH_BOX(&modelcenter::merge_master));
}
