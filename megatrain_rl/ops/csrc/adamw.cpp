// Host AdamW with an exact fp32 master weight, over one contiguous range, and its inverse. Torch reference and caller:
// ops/adamw.py.
//
// A bf16 weight is the high half of its fp32 master, rounded to nearest with ties away from zero; the residual is what
// is missing: master_bits = (high << 16) + residual. Ties go away because a tie rounded to an even high half would need
// a residual of +32768, which int16 cannot hold.
//
// Moments are fp32, or bf16 with stochastic rounding: 16 random bits are added below the kept half. The bits are a hash
// of the step's key and the element's index, so they do not depend on threads.
//
// A guarded step leaves an element as it is when its squared gradient is more than `guard` times its second moment:
// taking such a step back would lose the old moments in rounding. Because a step makes v at least (1 - beta2) g^2 and
// guard is well above 1 / (1 - beta2), g^2 > guard v holds afterwards for exactly the elements that were left, so
// Finish finds and steps them, and Undo leaves them alone. A guarded step marks the grains of kGrain elements with one
// left, and Finish reads no others.
//
// Each array is read and written once. The inner loops have a fixed trip count so that the compiler turns them into
// vector code of whatever width the processor has.

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t kLanes = 32;
// A squared gradient of this size (|g| about 1e-15) is within the guard whatever v is: where squares are no normal
// numbers, what a step makes of v says nothing any more.
constexpr float kNegligible = 0x1p-100f;
// Elements a thread takes at a time: 64 Ki are 26 x 64 KiB of traffic, long enough for the prefetchers, short enough
// that a thread which the scheduler put aside does not hold up the others.
constexpr int64_t kPiece = 65536;
// ops/adamw.py knows this number. A few elements left in a block of 200 million are then no second pass over it.
constexpr int64_t kGrain = 4096;

struct Scalars {
  float beta1, beta2, one_minus_beta1, one_minus_beta2, decay, step_size, inv_sqrt_bias2, eps, grad_scale;
  float inv_beta1, inv_beta2, inv_decay, guard;
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
  // What the moments will be once stored.
  static float rounded_m(float m1, uint32_t) { return m1; }
  static float rounded_v(float v1, uint32_t) { return v1; }
  static uint32_t random(int64_t, uint32_t) { return 0; }
  void store(int64_t i, float m1, float v1) const {
    m[i] = m1;
    v[i] = v1;
  }
};

struct Bf16Moments {
  uint16_t *m, *v;
  float load_m(int64_t i) const { return from_bits(static_cast<uint32_t>(m[i]) << 16); }
  float load_v(int64_t i) const { return from_bits(static_cast<uint32_t>(v[i]) << 16); }
  static float rounded_m(float m1, uint32_t random) { return from_bits((to_bits(m1) + (random & 0xffffu)) & 0xffff0000u); }
  static float rounded_v(float v1, uint32_t random) { return from_bits((to_bits(v1) + (random >> 16)) & 0xffff0000u); }
  static uint32_t random(int64_t i, uint32_t key) { return random_bits(static_cast<uint32_t>(i) ^ key); }
  void store(int64_t i, float m1, float v1) const {
    m[i] = static_cast<uint16_t>(to_bits(m1) >> 16);
    v[i] = static_cast<uint16_t>(to_bits(v1) >> 16);
  }
};

enum Mode { kStep = 0, kGuardedStep = 1, kFinish = 2, kUndo = 3 };

// Returns whether the guard held for this element (it is then unchanged by a guarded step and by its undoing).
template <int mode, class Weights, class Grad, class Moments>
inline int one(const Weights& weights, const Grad* grad, const Moments& moments, int64_t i, const Scalars& s) {
  const float g = load_grad(grad[i]) * s.grad_scale;
  const float m0 = moments.load_m(i), v0 = moments.load_v(i), w0 = weights.load(i);
  const int guarded = g * g > s.guard * v0 + kNegligible;
  const uint32_t random = Moments::random(i, s.key);
  float m1, v1, w1;
  if (mode == kUndo) {
    const float denominator = std::sqrt(v0) * s.inv_sqrt_bias2 + s.eps;
    w1 = (w0 + (s.step_size * m0) / denominator) * s.inv_decay;
    m1 = Moments::rounded_m((m0 - g * s.one_minus_beta1) * s.inv_beta1, random);
    const float v = (v0 - (g * g) * s.one_minus_beta2) * s.inv_beta2;
    v1 = Moments::rounded_v(v > 0.0f ? v : 0.0f, random);
  } else {
    // The step is taken with the moments as they are stored, so that it can be taken back.
    m1 = Moments::rounded_m(m0 * s.beta1 + g * s.one_minus_beta1, random);
    v1 = Moments::rounded_v(v0 * s.beta2 + (g * g) * s.one_minus_beta2, random);
    const float denominator = std::sqrt(v1) * s.inv_sqrt_bias2 + s.eps;
    w1 = w0 * s.decay - (s.step_size * m1) / denominator;
  }
  if (mode != kStep) {
    const bool keep = (mode == kFinish) != static_cast<bool>(guarded);
    m1 = keep ? m0 : m1;
    v1 = keep ? v0 : v1;
    w1 = keep ? w0 : w1;
  }
  moments.store(i, m1, v1);
  weights.store(i, w1);
  return guarded;
}

template <int mode, class Weights, class Grad, class Moments>
int64_t run(const Weights weights, const Grad* grad, const Moments moments, int64_t n, const Scalars s, uint8_t* left, int threads) {
  const int64_t pieces = (n + kPiece - 1) / kPiece;
  int64_t total = 0;
#pragma omp parallel for schedule(dynamic) num_threads(threads) reduction(+ : total)
  for (int64_t p = 0; p < pieces; ++p) {
    const int64_t last = (p + 1) * kPiece < n ? (p + 1) * kPiece : n;
    for (int64_t start = p * kPiece; start < last; start += kGrain) {
      uint8_t* const mark = left ? left + start / kGrain : nullptr;
      if (mode == kFinish && mark && !*mark) continue;
      const int64_t end = start + kGrain < last ? start + kGrain : last;
      const int64_t whole = start + (end - start) / kLanes * kLanes;
      int count = 0;
      for (int64_t i = start; i < whole; i += kLanes) {
        // counted apart: gcc turns the same loop with a reduction into code five times as slow
        int guarded[kLanes];
#pragma omp simd
        for (int64_t k = 0; k < kLanes; ++k) guarded[k] = one<mode>(weights, grad, moments, i + k, s);
        for (int64_t k = 0; k < kLanes; ++k) count += guarded[k];
      }
      for (int64_t i = whole; i < end; ++i) count += one<mode>(weights, grad, moments, i, s);
      if (mode == kGuardedStep && mark) *mark = count > 0;
      total += count;
    }
  }
  return total;
}

struct Arguments {
  void* weight;
  int16_t* residual;
  const void* grad;
  void *m, *v;
  int64_t n;
  Scalars s;
  uint8_t* left;
  int weight_is_split, grad_is_bf16, moments_are_bf16, threads;
};

template <int mode, class Weights, class Moments>
int64_t with_moments(const Arguments& a, const Weights weights, const Moments moments) {
  if (a.grad_is_bf16) return run<mode>(weights, static_cast<const uint16_t*>(a.grad), moments, a.n, a.s, a.left, a.threads);
  return run<mode>(weights, static_cast<const float*>(a.grad), moments, a.n, a.s, a.left, a.threads);
}

template <int mode, class Weights>
int64_t with_weights(const Arguments& a, const Weights weights) {
  if (a.moments_are_bf16) {
    return with_moments<mode>(a, weights, Bf16Moments{static_cast<uint16_t*>(a.m), static_cast<uint16_t*>(a.v)});
  }
  return with_moments<mode>(a, weights, Fp32Moments{static_cast<float*>(a.m), static_cast<float*>(a.v)});
}

template <int mode>
int64_t dispatch(const Arguments& a) {
  if (a.weight_is_split) return with_weights<mode>(a, Split{static_cast<uint16_t*>(a.weight), a.residual});
  return with_weights<mode>(a, Whole{static_cast<float*>(a.weight)});
}

}  // namespace

extern "C" {

// weight: uint16 bf16 bits (split) or float; residual: int16 or null; grad, m, v: bf16 bits or float; scalars: the
// floats of Scalars. left: a byte for each grain, written by a guarded step, read by Finish; or null, and Finish reads
// all. Returns for how many elements the guard held.
int64_t megatrain_adamw(void* weight, int16_t* residual, const void* grad, void* m, void* v, int64_t n, const float* scalars,
                        uint32_t key, uint8_t* left, int weight_is_split, int grad_is_bf16, int moments_are_bf16, int mode, int threads) {
  Arguments a{weight, residual, grad, m, v, n, {}, left, weight_is_split, grad_is_bf16, moments_are_bf16, threads};
  std::memcpy(&a.s, scalars, sizeof(Scalars) - sizeof(uint32_t));
  a.s.key = key;
  switch (mode) {
    case kStep: return dispatch<kStep>(a);
    case kGuardedStep: return dispatch<kGuardedStep>(a);
    case kFinish: return dispatch<kFinish>(a);
    default: return dispatch<kUndo>(a);
  }
}

}  // extern "C"
