// Shared by both bindings: checks of tensors, and their layout for the kernels.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "check.h"
#include "job.h"
#include "quantize.h"
#include "random.h"

namespace modelcenter {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Tensors = std::vector<Tensor>;

inline int type_of(const Tensor& t, const char* name) {
  const ScalarType type = t.scalar_type();
  if (type == ScalarType::Float) return kFloat;
  if (type == ScalarType::BFloat16) return kBfloat16;
  if (type == ScalarType::Half) return kHalf;
  MC_CHECK(false, name, " holds a dtype that is not fp32, bf16 or fp16");
  return -1;
}

inline void same_device(const Tensor& t, const Tensor& first, const char* name) {
  MC_CHECK(t.is_cpu() == first.is_cpu() && t.get_device_index() == first.get_device_index(), name,
                  " is on another device than the rest");
}

// Checks a matrix whose rows are contiguous, but need not be adjacent.
inline void contiguous_rows(const Tensor& t, const char* name) {
  MC_CHECK((t.stride(1) == 1 || t.size(1) < 2) && (t.stride(0) >= t.size(1) || t.size(0) < 2), "the rows of ",
                  name, " are not contiguous");
}

inline Tensor in_a_row(const Tensor& t) { return t.is_contiguous() ? t : torch::stable::contiguous(t); }

// A matrix whose rows are contiguous, but need not be adjacent: the given one, or a copy.
inline Tensor with_rows(const Tensor& given, const char* name) {
  MC_CHECK(given.dim() == 2, name, " has ", given.dim(), " dimensions, expected 2");
  const bool as_it_lies = (given.stride(1) == 1 || given.size(1) < 2) && given.stride(0) >= given.size(1);
  return as_it_lies ? given : torch::stable::contiguous(given);
}

// Checks that memory which a call reads or writes is not also written as part of another tensor.
class Overlaps {
 public:
  void add(const void* data, int64_t bytes, bool written) {
    if (bytes) ranges_.push_back({(uintptr_t)data, (uintptr_t)data + (uintptr_t)bytes, written});
  }
  void check() {
    std::sort(ranges_.begin(), ranges_.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
    uintptr_t written = 0, any = 0;  // the end of earlier ranges
    for (const Range& r : ranges_) {
      MC_CHECK(r.begin >= written && (!r.written || r.begin >= any), "two of the tensors overlap in memory");
      any = std::max(any, r.end);
      if (r.written) written = std::max(written, r.end);
    }
  }

 private:
  struct Range {
    uintptr_t begin, end;
    bool written;
  };
  std::vector<Range> ranges_;
};

// A lazy clone shares its memory until it is written: mutable_data_ptr gives it its own memory.
inline void* data_of(const Tensor& t, bool written) {
  return written ? t.mutable_data_ptr() : (void*)t.const_data_ptr();
}

inline float* scalar(const Tensor& t, const Tensor& like, const char* name, bool written) {
  MC_CHECK(t.numel() == 1 && t.scalar_type() == ScalarType::Float, name, " must be one fp32 number");
  same_device(t, like, name);
  return (float*)data_of(t, written);
}

inline const float* scalar(const std::optional<Tensor>& t, const Tensor& like, const char* name) {
  return t ? scalar(*t, like, name, false) : nullptr;
}

inline int byte_of(const Tensor& t, const char* name) {
  MC_CHECK(t.scalar_type() == ScalarType::Byte, name, " must hold uint8 numbers");
  return kByte;
}

// The scales of 8-bit moments; otherwise empty.
struct Scales {
  Tensors m, v;
  std::vector<int64_t> widths;
};

struct Call {
  std::vector<Slab> slabs;
  Types types{};
};

inline Call lay_out(const Tensors& p, const Tensors& g, const Tensors& m, const Tensors& v, const Tensors& aux,
                    const Tensors& step, int rule, int64_t mode, const std::vector<int64_t>& places,
                    const Scales& scales) {
  const size_t count = p.size(), blocks = rule == kAdamW8 ? count : 0;
  const size_t seconds = rule == kAdamW || blocks ? count : 0, extras = mode == kMaster || mode == kRemainder ? count : 0;
  MC_CHECK(mode >= kPlain && mode <= kRandom, "mode must be 0 to 3");
  MC_CHECK(g.size() == count && m.size() == count && step.size() == count && v.size() == seconds &&
                      aux.size() == extras && places.size() == (mode == kRandom || blocks ? 4 * count : 0) &&
                      scales.m.size() == blocks && scales.v.size() == blocks && scales.widths.size() == blocks,
                  "the lists differ in length");
  Call call;
  call.slabs.reserve(count);
  Overlaps overlaps;
  for (size_t i = 0; i < count; i++) {
    const int64_t n = p[i].numel();
    const int m_type = blocks ? byte_of(m[i], "m") : type_of(m[i], "m");
    const Types types{type_of(p[i], "p"), type_of(g[i], "g"), m_type, (int)mode};
    if (i == 0) {
      call.types = types;
      const bool fits = mode == kPlain ? types.p == kFloat : mode == kMaster ? true : types.p == kBfloat16;
      MC_CHECK(fits, "p has a dtype that this mode does not keep");
      MC_CHECK(types.m != kHalf, "m must be fp32 or bf16");
    }
    MC_CHECK(types.p == call.types.p && types.g == call.types.g && types.m == call.types.m,
                    "the tensors of a list differ in dtype");
    auto take = [&](const Tensor& t, const char* name, int bytes, bool written) {
      MC_CHECK(t.numel() == n, name, "[", (int64_t)i, "] has ", t.numel(), " elements, p has ", n);
      MC_CHECK(t.is_contiguous(), name, "[", (int64_t)i, "] is not contiguous");
      same_device(t, p[0], name);
      void* data = data_of(t, written);
      overlaps.add(data, n * bytes, written);
      return data;
    };
    Slab slab{};
    slab.n = n;
    slab.p = take(p[i], "p", size_of(types.p), true);
    slab.g = take(g[i], "g", size_of(types.g), false);
    slab.m = take(m[i], "m", size_of(types.m), true);
    if (seconds) {
      MC_CHECK((blocks ? byte_of(v[i], "v") : type_of(v[i], "v")) == types.m, "m and v differ in dtype");
      slab.v = take(v[i], "v", size_of(types.m), true);
    }
    if (extras) {
      const ScalarType wanted = mode == kMaster ? ScalarType::Float : ScalarType::Short;
      MC_CHECK(aux[i].scalar_type() == wanted, "aux must be fp32 masters, or int16 remainders");
      slab.aux = take(aux[i], "aux", mode == kMaster ? 4 : 2, true);
    }
    MC_CHECK(step[i].numel() == 1 && step[i].scalar_type() == ScalarType::Float, "step must hold fp32 numbers");
    same_device(step[i], p[0], "step");
    slab.step = (float*)step[i].mutable_data_ptr();
    overlaps.add(slab.step, 4, true);
    if (blocks) {
      slab.width = scales.widths[i];
      MC_CHECK(slab.width > 0 && n % slab.width == 0, "widths: rows must divide the elements of p");
      const int64_t wanted = n / slab.width * ((slab.width + kQuantBlock - 1) / kQuantBlock);
      auto scale = [&](const Tensor& t, const char* name) {
        MC_CHECK(t.scalar_type() == ScalarType::Float && t.is_contiguous() && t.numel() == wanted, name, "[",
                        (int64_t)i, "] must be ", wanted, " contiguous fp32 numbers, one for each block");
        same_device(t, p[0], name);
        float* data = (float*)t.mutable_data_ptr();
        overlaps.add(data, wanted * 4, true);
        return data;
      };
      slab.m_scale = scale(scales.m[i], "m_scale");
      slab.v_scale = scale(scales.v[i], "v_scale");
    }
    if (mode == kRandom || blocks) {
      slab.place = {places[4 * i], places[4 * i + 1], places[4 * i + 2], places[4 * i + 3]};
      MC_CHECK(slab.place.inner > 0 || n == 0, "places: the inner size must be above 0");
    }
    call.slabs.push_back(slab);
  }
  overlaps.check();
  return call;
}

inline void check_pair(const Tensor& a, const Tensor& b, const char* names) {
  MC_CHECK(a.numel() == b.numel(), names, " differ in size");
  MC_CHECK(a.is_contiguous() && b.is_contiguous(), names, " must be contiguous");
}

inline void check_cast(const Tensors& out, const Tensors& in) {
  MC_CHECK(out.size() == in.size(), "the lists differ in length");
  Overlaps overlaps;
  for (size_t i = 0; i < out.size(); i++) {
    check_pair(out[i], in[i], "out and input");
    same_device(in[i], out[0], "input");
    same_device(out[i], out[0], "out");
    overlaps.add(data_of(out[i], true), out[i].numel() * size_of(type_of(out[i], "out")), true);
    overlaps.add(in[i].const_data_ptr(), in[i].numel() * size_of(type_of(in[i], "input")), false);
  }
  overlaps.check();
}

inline void check_split(const Tensors& master, const Tensors& p, const Tensors& low) {
  MC_CHECK(master.size() == p.size() && low.size() == p.size(), "the lists differ in length");
  Overlaps overlaps;
  for (size_t i = 0; i < p.size(); i++) {
    MC_CHECK(master[i].scalar_type() == ScalarType::Float && p[i].scalar_type() == ScalarType::BFloat16 &&
                        low[i].scalar_type() == ScalarType::Short,
                    "expected fp32 masters, bf16 parameters and int16 remainders");
    check_pair(master[i], p[i], "master and p");
    check_pair(low[i], p[i], "remainder and p");
    same_device(master[i], p[0], "master");
    same_device(low[i], p[0], "remainder");
    overlaps.add(data_of(master[i], true), master[i].numel() * 4, true);
    overlaps.add(data_of(p[i], true), p[i].numel() * 2, true);
    overlaps.add(data_of(low[i], true), low[i].numel() * 2, true);
  }
  overlaps.check();
}

// The draw of a call with these arguments, with the scale of kept elements.
inline Draw draw_of(const int64_t* tokens, int64_t first_token, int64_t first_channel, int64_t key, int64_t site,
                    int64_t threshold) {
  MC_CHECK(threshold >= 0 && threshold < 65536, "threshold must be 0 to 65535");
  return {tokens, first_token, first_channel, (uint32_t)key, (uint32_t)((uint64_t)key >> 32), (uint32_t)site,
          (uint32_t)threshold, 65536.0f / (float)(65536 - threshold)};
}

// Checks the token numbers of the rows of x.
inline void check_tokens(const Tensor& tokens, const Tensor& x, int64_t rows) {
  MC_CHECK(tokens.scalar_type() == ScalarType::Long && tokens.numel() == rows && tokens.is_contiguous(),
                  "tokens must be contiguous int64 numbers, one for each row of x");
  same_device(tokens, x, "tokens");
}

// Checks the tensors of a dropout, and returns its draw.
inline Draw check_dropout(const Tensor& out, const Tensor& x, const std::optional<Tensor>& residual,
                          const std::optional<Tensor>& tokens, int64_t first_token, int64_t first_channel, int64_t key,
                          int64_t site, int64_t threshold) {
  MC_CHECK(x.dim() == 2, "x must be of shape (tokens, channels)");
  MC_CHECK(first_channel >= 0 && first_channel + x.size(1) <= ((int64_t)1 << 32), "too many channels");
  const int type = type_of(x, "x");
  Overlaps overlaps;
  auto take = [&](const Tensor& t, const char* name, bool written) {
    MC_CHECK(t.numel() == x.numel() && type_of(t, name) == type, name, " differs from x in size or dtype");
    MC_CHECK(t.is_contiguous(), name, " is not contiguous");
    same_device(t, x, name);
    overlaps.add(data_of(t, written), t.numel() * size_of(type), written);
  };
  take(x, "x", false);
  take(out, "out", true);
  if (residual) take(*residual, "residual", false);
  overlaps.check();
  if (tokens) check_tokens(*tokens, x, x.size(0));
  return draw_of(tokens ? (const int64_t*)tokens->const_data_ptr() : nullptr, first_token, first_channel, key, site,
                 threshold);
}

// The arguments of a cross-entropy.
struct LossCall {
  void* logits;
  float* loss;
  const int64_t* targets;
  const float* count;  // null: 1
  int type;
  int64_t rows, classes, stride;
};

inline LossCall check_loss(const Tensor& logits, const Tensor& loss, const Tensor& targets,
                           const std::optional<Tensor>& count) {
  MC_CHECK(logits.dim() == 2, "logits must have 2 dimensions");
  LossCall call{};
  call.type = type_of(logits, "logits");
  call.rows = logits.size(0), call.classes = logits.size(1), call.stride = logits.stride(0);
  MC_CHECK(call.classes < (int64_t)1 << 31, "logits has ", call.classes, " classes, expected less than 2^31");
  MC_CHECK(call.classes > 0 || call.rows == 0, "logits has no classes");
  contiguous_rows(logits, "logits");
  MC_CHECK(loss.scalar_type() == ScalarType::Float && loss.numel() == call.rows && loss.is_contiguous(),
                  "loss must be ", call.rows, " contiguous fp32 numbers");
  MC_CHECK(targets.scalar_type() == ScalarType::Long && targets.numel() == call.rows && targets.is_contiguous(),
                  "targets must be ", call.rows, " contiguous int64 numbers");
  same_device(loss, logits, "loss");
  same_device(targets, logits, "targets");
  call.count = scalar(count, logits, "count");
  call.logits = logits.mutable_data_ptr();
  call.loss = (float*)loss.mutable_data_ptr();
  call.targets = (const int64_t*)targets.const_data_ptr();
  const int64_t numbers = call.rows ? (call.rows - 1) * call.stride + call.classes : 0;
  Overlaps overlaps;
  overlaps.add(call.logits, numbers * size_of(call.type), true);
  overlaps.add(call.loss, 4 * call.rows, true);
  overlaps.add(call.targets, 8 * call.rows, false);
  overlaps.check();
  return call;
}

// The data of a tensor, which must be contiguous, with `count` elements of this type, on the device of `like`.
inline const void* take_numbers(const Tensor& t, const char* name, int64_t count, int type, const Tensor& like) {
  same_device(t, like, name);
  MC_CHECK(t.numel() == count && t.is_contiguous(), name, " has ", t.numel(), " numbers, expected ", count,
                  ", contiguous");
  MC_CHECK(type_of(t, name) == type, name, " must be of ", type == kFloat ? "fp32" : "the dtype of x");
  return t.const_data_ptr();
}

// Convert the operators' arguments to those of the function that does the step on one kind of device.
using StepFunction = void (*)(int rule, const Tensors& p, const Tensors& g, const Tensors& m, const Tensors& v,
                              const Tensors& aux, const Tensors& steps, const std::optional<Tensor>& gscale,
                              const std::optional<Tensor>& found_inf, const Settings& settings, int64_t mode,
                              const std::vector<int64_t>& places, const Scales& scales, int64_t stream);

template <StepFunction kStep>
void adamw(Tensors p, Tensors g, Tensors m, Tensors v, Tensors aux, Tensors steps, std::optional<Tensor> gscale,
           std::optional<Tensor> found_inf, double lr, double beta1, double beta2, double eps, double weight_decay,
           int64_t mode, std::vector<int64_t> places, int64_t stream) {
  const Settings settings{lr, beta1, beta2, eps, weight_decay, 0};
  kStep(kAdamW, p, g, m, v, aux, steps, gscale, found_inf, settings, mode, places, Scales(), stream);
}

template <StepFunction kStep>
void adamw8(Tensors p, Tensors g, Tensors m, Tensors v, Tensors m_scale, Tensors v_scale, Tensors aux, Tensors steps,
            std::optional<Tensor> gscale, std::optional<Tensor> found_inf, double lr, double beta1, double beta2,
            double eps, double weight_decay, std::vector<int64_t> widths, int64_t mode, std::vector<int64_t> places,
            int64_t stream) {
  const Settings settings{lr, beta1, beta2, eps, weight_decay, 0};
  kStep(kAdamW8, p, g, m, v, aux, steps, gscale, found_inf, settings, mode, places, Scales{m_scale, v_scale, widths}, stream);
}

template <StepFunction kStep>
void lion(Tensors p, Tensors g, Tensors m, Tensors aux, Tensors steps, std::optional<Tensor> gscale,
          std::optional<Tensor> found_inf, double lr, double beta1, double beta2, double weight_decay, int64_t mode,
          std::vector<int64_t> places, int64_t stream) {
  const Settings settings{lr, beta1, beta2, 0.0, weight_decay, 0};
  kStep(kLion, p, g, m, Tensors(), aux, steps, gscale, found_inf, settings, mode, places, Scales(), stream);
}

template <StepFunction kStep>
void momentum(Tensors p, Tensors g, Tensors m, Tensors aux, Tensors steps, std::optional<Tensor> gscale,
              std::optional<Tensor> found_inf, double lr, double momentum, double weight_decay, bool nesterov,
              int64_t mode, std::vector<int64_t> places, int64_t stream) {
  const Settings settings{lr, momentum, 0.0, 0.0, weight_decay, nesterov};
  kStep(kMomentum, p, g, m, Tensors(), aux, steps, gscale, found_inf, settings, mode, places, Scales(), stream);
}

}  // namespace modelcenter
