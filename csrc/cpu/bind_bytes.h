// Transposes, copies and checksums of bytes, and counters shared by processes: checks of the arguments.
#pragma once
#include "../core/arguments.h"
#include "counters.h"
#include "kernels.h"

namespace modelcenter {
namespace {

inline int64_t span(const Tensor& t) {  // bytes from the first element of a matrix to the last
  return (int64_t)t.element_size() * ((t.size(0) - 1) * t.stride(0) + t.size(1));
}

void transpose(Tensor out, Tensor in, bool past_caches) {
  STD_TORCH_CHECK(out.dim() == 2 && in.dim() == 2 && out.size(0) == in.size(1) && out.size(1) == in.size(0),
                  "out must have the size of the transpose of in, both with 2 dimensions");
  const int64_t size = (int64_t)in.element_size();
  STD_TORCH_CHECK(out.scalar_type() == in.scalar_type() && (size == 2 || size == 4 || size == 8),
                  "out and in must have one dtype, of 2, 4 or 8 bytes");
  same_device(in, out, "in");
  if (!in.numel()) return;
  const Tensor* both[2] = {&out, &in};
  Overlaps overlaps;
  for (const Tensor* t : both) {
    contiguous_rows(*t, t == &out ? "out" : "in");
    overlaps.add(t->const_data_ptr(), span(*t), t == &out);
  }
  overlaps.check();
  kernels().transpose(out.mutable_data_ptr(), in.const_data_ptr(), (int)size, in.size(0), in.size(1), out.stride(0),
                      in.stride(0), past_caches);
}

constexpr int64_t kPages = 64 * 1024;  // the least number of bytes for a thread

int64_t bytes_of(const Tensor& t) { return t.numel() * (int64_t)t.element_size(); }

void clear_pages(Tensor x) {
  STD_TORCH_CHECK(x.is_contiguous(), "x is not contiguous");
  uint8_t* const bytes = (uint8_t*)x.mutable_data_ptr();
  torch::stable::parallel_for(0, bytes_of(x), kPages, [&](int64_t begin, int64_t end) {
    kernels().clear_pages(bytes + begin, end - begin);
  });
}

void copy_pages(Tensor out, Tensor x) {
  STD_TORCH_CHECK(x.is_contiguous() && out.is_contiguous(), "x and out must be contiguous");
  STD_TORCH_CHECK(bytes_of(x) == bytes_of(out), "out has ", bytes_of(out), " bytes, expected ", bytes_of(x));
  same_device(out, x, "out");
  Overlaps overlaps;
  overlaps.add(x.const_data_ptr(), bytes_of(x), false);
  overlaps.add(out.const_data_ptr(), bytes_of(out), true);
  overlaps.check();
  uint8_t* const to = (uint8_t*)out.mutable_data_ptr();
  const uint8_t* const from = (const uint8_t*)x.const_data_ptr();
  torch::stable::parallel_for(0, bytes_of(x), kPages, [&](int64_t begin, int64_t end) {
    kernels().copy_pages(to + begin, from + begin, end - begin);
  });
}

int64_t checksum(Tensor x, int64_t start) {
  STD_TORCH_CHECK(x.is_contiguous(), "x is not contiguous");
  STD_TORCH_CHECK(start >= 0 && start <= 0xFFFFFFFF, "start is ", start, ", which is no CRC-32");
  return kernels().crc32((uint32_t)start, (const uint8_t*)x.const_data_ptr(), bytes_of(x));
}

bool sha256_states(Tensor first, Tensor x, Tensor second, Tensor y) {
  const Tensor* states[2] = {&first, &second};
  const Tensor* bytes[2] = {&x, &y};
  Overlaps overlaps;
  for (int i = 0; i < 2; i++) {
    STD_TORCH_CHECK(states[i]->is_contiguous() && states[i]->numel() == 8 && states[i]->element_size() == 4,
                    "a state must be 8 contiguous numbers of 4 bytes");
    STD_TORCH_CHECK(bytes[i]->is_contiguous() && bytes[i]->element_size() == 1 && bytes[i]->numel() % 64 == 0,
                    "x and y must be contiguous bytes, a multiple of 64");
    same_device(*states[i], first, "a state");
    same_device(*bytes[i], first, "x or y");
    overlaps.add(states[i]->const_data_ptr(), 32, true);
    overlaps.add(bytes[i]->const_data_ptr(), bytes[i]->numel(), false);
  }
  overlaps.check();
  return kernels().sha256((uint32_t*)first.mutable_data_ptr(), (const uint8_t*)x.const_data_ptr(), x.numel(),
                          (uint32_t*)second.mutable_data_ptr(), (const uint8_t*)y.const_data_ptr(), y.numel());
}

inline void check_counter(const Tensor& counter) {
  STD_TORCH_CHECK(counter.numel() == 1 && counter.element_size() == 8 && (uintptr_t)counter.const_data_ptr() % 8 == 0,
                  "a counter must be one aligned number of 8 bytes");
}

void count_to(Tensor counter, int64_t value) {
  check_counter(counter);
  set_counter((int64_t*)counter.mutable_data_ptr(), value);
}

bool count_reached(Tensor counter, int64_t value, int64_t milliseconds) {
  check_counter(counter);
  return wait_for_counter((const int64_t*)counter.const_data_ptr(), value, milliseconds);
}

}  // namespace
}  // namespace modelcenter
