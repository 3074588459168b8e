// Host AdamW with an exact fp32 master weight, over one contiguous range, and its inverse. Torch reference and caller: ops/adamw.py.
//
// A bf16 weight is the high half of its fp32 master, rounded to nearest with ties away from zero; the residual is what is
// missing: master_bits = (high << 16) + residual. Ties go away because a tie rounded to an even high half would need a residual
// of +32768, which int16 cannot hold.
//
// Moments are fp32, or bf16 with stochastic rounding: 16 random bits are added below the kept half. The bits are a hash of the
// step's key and the element's index, so they do not depend on threads.
//
// Each array is read and written once. The inner loops have a fixed trip count so that the compiler turns them into vector
// code of whatever width the processor has.

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t kLanes = 32;
// Elements a thread takes at a time: 64 Ki are 26 x 64 KiB of traffic, long enough for the prefetchers, short enough that a thread
// which the scheduler put aside does not hold up the others.
constexpr int64_t kPiece = 65536;

struct Scalars {
  float beta1, beta2, one_minus_beta1, one_minus_beta2, decay, step_size, inv_sqrt_bias2, eps, grad_scale;
  float inv_beta1, inv_beta2, inv_decay;
  uint32_t key;
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

// 32 well-mixed bits of an index (the lowbias32 finalizer, C. Wellons 2018).
inline uint32_t random_bits(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  x ^= x >> 16;
  return x;
}

struct Fp32Moments {
  float *m, *v;
  float load_m(int64_t i) const { return m[i]; }
  float load_v(int64_t i) const { return v[i]; }
  void store(int64_t i, float m1, float v1, uint32_t) const {
    m[i] = m1;
    v[i] = v1;
  }
};

struct Bf16Moments {
  uint16_t *m, *v;
  float load_m(int64_t i) const { return from_bits(static_cast<uint32_t>(m[i]) << 16); }
  float load_v(int64_t i) const { return from_bits(static_cast<uint32_t>(v[i]) << 16); }
  void store(int64_t i, float m1, float v1, uint32_t key) const {
    const uint32_t random = random_bits(static_cast<uint32_t>(i) ^ key);
    m[i] = static_cast<uint16_t>((to_bits(m1) + (random & 0xffffu)) >> 16);
    v[i] = static_cast<uint16_t>((to_bits(v1) + (random >> 16)) >> 16);
  }
};

struct Step {
  template <class Weights, class Grad, class Moments>
  static inline void one(const Weights& weights, const Grad* grad, const Moments& moments, int64_t i, const Scalars& s) {
    const float g = load_grad(grad[i]) * s.grad_scale;
    const float m1 = moments.load_m(i) * s.beta1 + g * s.one_minus_beta1;
    const float v1 = moments.load_v(i) * s.beta2 + (g * g) * s.one_minus_beta2;
    moments.store(i, m1, v1, s.key);
    const float denominator = std::sqrt(v1) * s.inv_sqrt_bias2 + s.eps;
    weights.store(i, weights.load(i) * s.decay - (s.step_size * m1) / denominator);
  }
};

// Takes a Step with the same scalars back, to fp32 rounding (bf16 moments: to one more stochastic rounding).
struct Undo {
  template <class Weights, class Grad, class Moments>
  static inline void one(const Weights& weights, const Grad* grad, const Moments& moments, int64_t i, const Scalars& s) {
    const float g = load_grad(grad[i]) * s.grad_scale;
    const float m1 = moments.load_m(i);
    const float v1 = moments.load_v(i);
    const float denominator = std::sqrt(v1) * s.inv_sqrt_bias2 + s.eps;
    weights.store(i, (weights.load(i) + (s.step_size * m1) / denominator) * s.inv_decay);
    const float v0 = (v1 - (g * g) * s.one_minus_beta2) * s.inv_beta2;
    moments.store(i, (m1 - g * s.one_minus_beta1) * s.inv_beta1, v0 > 0.0f ? v0 : 0.0f, s.key);
  }
};

template <class Update, class Weights, class Grad, class Moments>
void run(const Weights weights, const Grad* grad, const Moments moments, int64_t n, const Scalars s, int threads) {
  const int64_t pieces = (n + kPiece - 1) / kPiece;
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (int64_t p = 0; p < pieces; ++p) {
    const int64_t start = p * kPiece, end = start + kPiece < n ? start + kPiece : n;
    const int64_t whole = start + (end - start) / kLanes * kLanes;
    for (int64_t i = start; i < whole; i += kLanes) {
#pragma omp simd
      for (int64_t k = 0; k < kLanes; ++k) Update::one(weights, grad, moments, i + k, s);
    }
    for (int64_t i = whole; i < end; ++i) Update::one(weights, grad, moments, i, s);
  }
}

struct Arguments {
  void* weight;
  int16_t* residual;
  const void* grad;
  void *m, *v;
  int64_t n;
  Scalars s;
  int weight_is_split, grad_is_bf16, moments_are_bf16, threads;
};

template <class Update, class Weights, class Moments>
void with_moments(const Arguments& a, const Weights weights, const Moments moments) {
  if (a.grad_is_bf16) run<Update>(weights, static_cast<const uint16_t*>(a.grad), moments, a.n, a.s, a.threads);
  else run<Update>(weights, static_cast<const float*>(a.grad), moments, a.n, a.s, a.threads);
}

template <class Update, class Weights>
void with_weights(const Arguments& a, const Weights weights) {
  if (a.moments_are_bf16) {
    with_moments<Update>(a, weights, Bf16Moments{static_cast<uint16_t*>(a.m), static_cast<uint16_t*>(a.v)});
  } else {
    with_moments<Update>(a, weights, Fp32Moments{static_cast<float*>(a.m), static_cast<float*>(a.v)});
  }
}

template <class Update>
void dispatch(const Arguments& a) {
  if (a.weight_is_split) with_weights<Update>(a, Split{static_cast<uint16_t*>(a.weight), a.residual});
  else with_weights<Update>(a, Whole{static_cast<float*>(a.weight)});
}

}  // namespace

extern "C" {

// weight: uint16 bf16 bits (split) or float; residual: int16 or null; grad, m, v: bf16 bits or float; scalars: the floats of Scalars.
void megatrain_adamw(void* weight, int16_t* residual, const void* grad, void* m, void* v, int64_t n, const float* scalars,
                     uint32_t key, int weight_is_split, int grad_is_bf16, int moments_are_bf16, int undo, int threads) {
  Arguments a{weight, residual, grad, m, v, n, {}, weight_is_split, grad_is_bf16, moments_are_bf16, threads};
  std::memcpy(&a.s, scalars, sizeof(Scalars) - sizeof(uint32_t));
  a.s.key = key;
  if (undo) dispatch<Undo>(a);
  else dispatch<Step>(a);
}

}  // extern "C"
