// Host AdamW with an exact fp32 master weight, over one contiguous range. Torch reference and caller: ops/adamw.py.
//
// A bf16 weight is the high half of its fp32 master, rounded to nearest with ties away from zero; the residual is what is
// missing: master_bits = (high << 16) + residual. Ties go away because a tie rounded to an even high half would need a residual
// of +32768, which int16 cannot hold.
//
// Each array is read and written once. The inner loops have a fixed trip count so that the compiler turns them into vector
// code of whatever width the processor has.

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t kLanes = 32;

struct Scalars {
  float beta1, beta2, one_minus_beta1, one_minus_beta2, decay, step_size, inv_sqrt_bias2, eps, grad_scale;
};

inline float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float load_grad(uint16_t g) { return from_bits(static_cast<uint32_t>(g) << 16); }
inline float load_grad(float g) { return g; }

// Weights in two halves (bf16 + residual) or whole (fp32, residual unused).
struct Split {
  uint16_t* high;
  int16_t* low;
  float load(int64_t i) const {
    return from_bits((static_cast<uint32_t>(high[i]) << 16) + static_cast<uint32_t>(static_cast<int32_t>(low[i])));
  }
  void store(int64_t i, float w) const {
    const uint32_t bits = to_bits(w);
    const uint32_t rounded = (bits + 0x8000u) >> 16;
    high[i] = static_cast<uint16_t>(rounded);
    low[i] = static_cast<int16_t>(bits - (rounded << 16));
  }
};

struct Whole {
  float* weight;
  float load(int64_t i) const { return weight[i]; }
  void store(int64_t i, float w) const { weight[i] = w; }
};

template <class Weights, class Grad>
inline void one(const Weights& weights, const Grad* grad, float* m, float* v, int64_t i, const Scalars& s) {
  const float g = load_grad(grad[i]) * s.grad_scale;
  const float m1 = m[i] * s.beta1 + g * s.one_minus_beta1;
  const float v1 = v[i] * s.beta2 + (g * g) * s.one_minus_beta2;
  m[i] = m1;
  v[i] = v1;
  const float denominator = std::sqrt(v1) * s.inv_sqrt_bias2 + s.eps;
  weights.store(i, weights.load(i) * s.decay - (s.step_size * m1) / denominator);
}

template <class Weights, class Grad>
void run(const Weights weights, const Grad* grad, float* m, float* v, int64_t n, const Scalars s, int threads) {
  const int64_t blocks = n / kLanes;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t b = 0; b < blocks; ++b) {
#pragma omp simd
    for (int64_t k = 0; k < kLanes; ++k) one(weights, grad, m, v, b * kLanes + k, s);
  }
  for (int64_t i = blocks * kLanes; i < n; ++i) one(weights, grad, m, v, i, s);
}

}  // namespace

extern "C" {

// weight: uint16 bf16 bits (split) or float; residual: int16 or null; grad: bf16 bits or float; scalars: see Scalars.
void megatrain_adamw(void* weight, int16_t* residual, const void* grad, float* m, float* v, int64_t n, const float* scalars,
                     int weight_is_split, int grad_is_bf16, int threads) {
  Scalars s;
  std::memcpy(&s, scalars, sizeof s);
  if (weight_is_split) {
    const Split weights{static_cast<uint16_t*>(weight), residual};
    if (grad_is_bf16) run(weights, static_cast<const uint16_t*>(grad), m, v, n, s, threads);
    else run(weights, static_cast<const float*>(grad), m, v, n, s, threads);
  } else {
    const Whole weights{static_cast<float*>(weight)};
    if (grad_is_bf16) run(weights, static_cast<const uint16_t*>(grad), m, v, n, s, threads);
    else run(weights, static_cast<const float*>(grad), m, v, n, s, threads);
  }
}

}  // extern "C"
