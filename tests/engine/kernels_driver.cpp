// Runs every kernel of csrc/cpu on inputs that a hash makes, so that two builds of it can be compared, or one be watched
// by a sanitizer: memory is as large as a kernel may touch and no larger, and what may be cut among threads is. Each
// section of what it prints is a line "name type count" and then the numbers, as they lie in memory.
#include "kernels_driver.h"

#include "cpu/counters.h"
#include "kernels_driver_scratch.h"

#if defined(__x86_64__)  // where these are not linked, the program is of the plain path alone
namespace modelcenter {
__attribute__((weak)) const CpuKernels& kernels_avx2() { return kernels_plain(); }
__attribute__((weak)) const CpuKernels& kernels_avx512() { return kernels_plain(); }
}  // namespace modelcenter
#endif

struct Form {
  const char* name;
  int mode, p, aux;  // the types of the parameters, and of what is beside them
  int64_t row = 13;  // how many elements follow one another in the whole tensor
};
static const Form kForms[] = {
    {"plain", kPlain, kFloat, -1},           {"master bf16", kMaster, kBfloat16, kFloat},
    {"master f16", kMaster, kHalf, kFloat},  {"remainder", kRemainder, kBfloat16, kBfloat16},
    {"random", kRandom, kBfloat16, -1},      {"random, long rows", kRandom, kBfloat16, -1, 700},
};

static void updates(bool odd) {
  const char* const rules[] = {"adamw", "lion", "sgdm"};
  const Settings settings{1e-3, 0.9, 0.999, 1e-8, 0.01, 1};
  for (int rule = 0; rule < 3; rule++)
    for (const Form& form : kForms)
      for (int g_type : {kFloat, kBfloat16, kHalf})
        for (int m_type : {kFloat, kBfloat16}) {
          const int64_t n = 1097;
          Bytes p = numbers(n, form.p, odd), m = numbers(n, m_type, odd), v = numbers(n, m_type, odd, true);
          Bytes aux = form.aux < 0 ? Bytes() : form.aux == kFloat ? numbers(n, kFloat, odd) : codes(2 * n);
          float step = 0.0f;
          const Place place{7, form.row, 900, ((int64_t)1 << 32) - 600};
          Slab slab{p.data(), nullptr, m.data(), v.data(), aux.data(), &step, n, place, nullptr, nullptr, 0};
          const Types types{form.p, g_type, m_type, form.mode, form.mode == kMaster};
          for (int turn = 1; turn <= 3; turn++) {
            const Bytes g = numbers(n, g_type, odd);
            slab.g = g.data();
            const Scalars s = rule == kAdamW ? AdamW::scalars(settings, turn)
                              : rule == kLion ? Lion::scalars(settings, turn) : Momentum::scalars(settings, turn);
            on_threads(2, [&](int64_t half) {
              k.update[rule](slab, types, s, 0.75f, mix(99u + (uint32_t)turn), half ? 500 : 0, half ? n : 500);
            });
          }
          const std::string name = rules[rule] + std::string(odd ? " odd, " : ", ") + form.name + ", g " +
                                   kTypes[g_type] + ", moments " + kTypes[m_type];
          show(name + ": p", p, form.p);
          show(name + ": m", m, m_type);
          if (rule == kAdamW) show(name + ": v", v, m_type);
          if (form.aux >= 0) show(name + ": aux", aux, form.aux == kFloat ? kFloat : kByte);
        }
}

static void updates_in_8_bits() {
  const Settings settings{1e-3, 0.9, 0.999, 1e-8, 0.01, 0};
  const int64_t width = 301, rows = 5, n = width * rows, blocks = rows * ((width + kQuantBlock - 1) / kQuantBlock);
  for (const Form& form : kForms) {
    Bytes p = numbers(n, form.p), m = codes(n), v = codes(n);
    Bytes aux = form.aux < 0 ? Bytes() : form.aux == kFloat ? numbers(n, kFloat) : codes(2 * n);
    std::vector<float> m_scale = floats(blocks, false, true), v_scale = floats(blocks, false, true);
    m_scale[3] = v_scale[3] = 0.0f;
    for (int64_t block : {3, 4})  // zeros, that stay zeros where the gradients are too
      for (int64_t i = 0; i < kQuantBlock && block == 3; i++) m[(size_t)(width + i)] = v[(size_t)(width + i)] = 0;
    float step = 0.0f;
    Slab slab{p.data(), nullptr, m.data(), v.data(), aux.data(), &step, n, {7, width, 2 * width, 11},
              m_scale.data(), v_scale.data(), width};
    for (int turn = 1; turn <= 3; turn++) {
      Bytes g = numbers(n, kBfloat16);
      memset(g.data() + 2 * width, 0, 2 * kQuantBlock);
      slab.g = g.data();
      k.update8(slab, {form.p, kBfloat16, kByte, form.mode, false}, AdamW::scalars(settings, turn), 0.75f,
                mix((uint32_t)turn), 0, blocks);
    }
    const std::string name = std::string("adamw8, ") + form.name;
    show(name + ": p", p, form.p);
    show(name + ": m", m, kByte);
    show(name + ": v", v, kByte);
    show(name + ": m_scale", m_scale);
    show(name + ": v_scale", v_scale);
  }
}

static void conversions() {
  for (int from : {kFloat, kBfloat16, kHalf})
    for (int64_t n : {1, 16, 511, 512, 1537}) {
      const Bytes x = numbers(n, from, true), ordinary = numbers(n, from);
      const std::string name = std::string(kTypes[from]) + " " + std::to_string(n);
      double sum;
      k.squares(ordinary.data(), from, n, &sum);
      show("squares " + name, "f64", &sum, 1, 8);
      for (int to : {kFloat, kBfloat16, kHalf})
        for (float scale : {1.0f, 0.3f}) {
          Bytes out((size_t)(n * size_of(to)));
          k.cast(out.data(), to, x.data(), from, scale, n);
          show("cast " + name + " to " + kTypes[to] + (scale == 1.0f ? "" : ", scaled"), out, to);
        }
    }
  for (int type : {kFloat, kBfloat16, kHalf}) {
    const int64_t n = (kSquared + 1) * kChunk + 17;
    const Bytes x = numbers(n, type);
    std::vector<double> sums((size_t)kSquared + 2);
    k.squares(x.data(), type, n, sums.data());
    show(std::string("squares of chunks of ") + kTypes[type], "f64", sums.data(), (int64_t)sums.size(), 8);
  }
  Bytes every(2 << 16);  // every number of 16 bits
  for (int i = 0; i < 1 << 16; i++) every[(size_t)(2 * i)] = (unsigned char)i, every[(size_t)(2 * i + 1)] = (unsigned char)(i >> 8);
  for (int from : {kBfloat16, kHalf}) {
    Bytes out(4 << 16);
    k.cast(out.data(), kFloat, every.data(), from, 1.0f, 1 << 16);
    show(std::string("every ") + kTypes[from], out, kFloat);
  }
  const std::vector<float> x = floats(4099, true);
  std::vector<uint16_t> high(x.size());
  std::vector<int16_t> low(x.size());
  std::vector<float> again(x.size());
  k.split(x.data(), high.data(), low.data(), (int64_t)x.size());
  k.merge(high.data(), low.data(), again.data(), (int64_t)x.size());
  show("split high", "bf16", high.data(), high.size(), 2);
  show("split low", "u16", low.data(), low.size(), 2);
  show("merge", again);
}

static void masks() {
  const int64_t tokens[] = {5, (int64_t)1 << 40, 0}, rows = 3;
  for (int type : {kFloat, kBfloat16, kHalf})
    for (int64_t n : {7, 16, 130, 300})
      for (int64_t first : {0, 16, 37})
        for (bool add : {false, true}) {
          const Draw draw{add ? tokens : nullptr, 1000, first, 0x12345678u, 0x9ABCDEF0u, 3, 20000, 65536.0f / 45536.0f};
          const Bytes x = numbers(rows * n, type, true), residual = numbers(rows * n, type);
          Bytes out(x.size());
          for (int64_t i = 0; i < rows; i++) {
            const size_t at = (size_t)(i * n * size_of(type));
            k.dropout(draw, i, x.data() + at, add ? residual.data() + at : nullptr, out.data() + at, type, 0, n);
          }
          show(std::string("dropout ") + kTypes[type] + " " + std::to_string(n) + " from " + std::to_string(first) +
                   (add ? ", added" : ""), out, type);
        }
}

static void norms() {
  const int64_t tokens[] = {5, (int64_t)1 << 40, 0, 9, 77}, rows = 5;
  for (int64_t n : {1, 63, 64, 1000})
    for (bool centered : {true, false})
      for (int added : {0, 1, 2}) {  // nothing, a branch, a branch with dropout
        const std::string name = std::string(centered ? "layer_norm " : "rms_norm ") + std::to_string(n) + ", " +
                                 std::to_string(added);
        const Draw draw{tokens, 0, 0, 0x12345678u, 0x9ABCDEF0u, 3, added == 2 ? 20000u : 0u, 65536.0f / 45536.0f};
        std::vector<float> x = floats(rows * n), branch = floats(rows * n), w = floats(n), b = floats(n);
        std::vector<float> sum(x.size()), out(x.size()), stats((size_t)(centered ? 2 * rows : rows));
        k.norm({kFloat, rows, n, 1e-5f, draw, x.data(), added ? branch.data() : nullptr, w.data(),
                centered ? b.data() : nullptr, added ? sum.data() : nullptr, out.data(), stats.data()}, 0, rows);
        if (!added) sum = x;
        show(name + ", sum", sum);
        show(name, out);
        show(name + ", stats", stats);
        const std::vector<float> grad = floats(rows * n), extra = floats(rows * n);
        std::vector<float> dx(x.size()), dbranch(x.size()), dw((size_t)n), db((size_t)n);
        NormBackwardJob job{kFloat, rows, n, centered, draw, grad.data(), nullptr, false, sum.data(), w.data(),
                            stats.data(), dx.data(), added == 2 ? dbranch.data() : nullptr, nullptr, nullptr};
        for (int more : {0, 1, 2}) {  // nothing, more of the gradient of out, that of the sum
          job.extra = more ? extra.data() : nullptr, job.extra_of_sum = more == 2;
          k.norm_backward(job, dw.data(), centered ? db.data() : nullptr, 0, rows);
          show(name + ", dx " + std::to_string(more), dx);
          show(name + ", dbranch " + std::to_string(more), dbranch);
        }
        k.norm_backward(job, nullptr, nullptr, 0, rows);
        show(name + ", dw", dw);
        show(name + ", db", db);
      }
}

static void rows_of_numbers() {
  for (int64_t n : {1, 63, 64, 1000}) {
    const int64_t rows = 5;
    const std::string size = " " + std::to_string(n);
    std::vector<float> x = floats(rows * n), grad = floats(rows * n), w = floats(n), out(x.size()), dx(x.size());
    std::vector<float> up = floats(rows * n), dup(x.size());
    for (int kind = 0; kind < kActivations; kind++)
      for (const float* factor : {(const float*)nullptr, (const float*)up.data()}) {
        const std::string name = "activation " + std::to_string(kind) + (factor ? " times" : "") + size;
        const ActivationJob job{kFloat, kind, rows, n, x.data(), factor, out.data(), grad.data(), dx.data(),
                                factor ? dup.data() : nullptr};
        k.activation(job, 0, rows * n);
        show(name, out);
        k.activation_backward(job, 0, rows * n);
        show(name + ", dx", dx);
        if (factor) show(name + ", dup", dup);
      }
    const int64_t target[] = {0, n - 1, n / 2, n / 3, 0};
    for (bool train : {false, true}) {
      std::vector<float> loss(5);
      k.cross_entropy(x.data(), n, target, loss.data(), rows, n, 0.5f, 0.1f, train);
      show(std::string("cross_entropy") + (train ? ", train" : "") + size, loss);
    }
    show("cross_entropy dx" + size, x);
  }
}

static void rotations() {
  for (int64_t half : {0, 1, 7, 16, 40})
    for (int64_t still : {0, 3})
      for (bool interleaved : {false, true})
        for (bool back : {false, true}) {
          const int64_t tokens = 5, width = 2 * half + still, heads = 3, apart = 2;
          std::vector<float> q = floats(tokens * heads * width + (tokens - 1) * apart), key = floats(tokens * width);
          std::vector<float> cos = floats(tokens * half), sin = floats(tokens * half), by((size_t)half);
          std::vector<float> new_q((size_t)(tokens * heads * width)), new_k(key.size());
          const Rotation job{{q.data(), new_q.data(), heads * width + apart, heads}, {key.data(), new_k.data(), width, 1},
                             cos.data(), sin.data(), kFloat, tokens, width, half, interleaved, back};
          k.rotate(job, 0, 2, by.data());
          k.rotate(job, 2, tokens, by.data());
          const std::string name = "rotate " + std::to_string(half) + " " + std::to_string(still) +
                                   (interleaved ? ", interleaved" : "") + (back ? ", back" : "");
          show(name + ", q", new_q);
          show(name + ", k", new_k);
        }
}

// Two threads in turns: what one writes before it counts up the other sees.
static void counters() {
  int64_t sent = 0, read = 0, payload = 0, wrong = 0;
  on_threads(2, [&](int64_t second) {
    for (int64_t i = 1; i <= 3000; i++) {
      if (second) {
        while (!wait_for_counter(&sent, i, 1)) continue;
        wrong += payload != i * i;
        set_counter(&read, i);
      } else {
        payload = i * i;
        set_counter(&sent, i);
        while (!wait_for_counter(&read, i, 1)) continue;
      }
    }
  });
  if (wrong || wait_for_counter(&sent, 3001, 2)) abort();
}

int main() {
  FlushDenormals flush;
  updates(false);
  updates(true);
  updates_in_8_bits();
  conversions();
  masks();
  norms();
  rows_of_numbers();
  rotations();
  products(k.product, "product ");
  products_of_few();
  attention(false);
  distances();
  bytes();
  counters();
  // Last, since not all instruction sets have it: what others are given stays the same.
  if (rounded()) products(rounded()->product, "rounded product "), attention(true);
  return 0;
}
