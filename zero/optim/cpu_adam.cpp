// Adam on host memory in one pass; built and called by cpu_adam.py, which says what is computed and to which bits.
//
// No header of torch or Python, so that it compiles in a second or two. Every operation is one IEEE fp32 operation in
// torch's order, and `fused` stands where torch's own kernels fuse; with -ffp-contract=off nothing else is fused.
// Vector bodies and scalar tails of the compiler's loops thus give the same bits, wherever a piece begins or ends.

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

inline uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// a * b + c. Without the instruction a library call would take its place, and torch does not fuse there either.
inline float fused(float a, float b, float c) {
#if defined(__FMA__) || defined(__FP_FAST_FMAF) || defined(__aarch64__)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

// The 16-bit types are integers here: branch-free conversions that the compiler vectorises on any CPU. Rounding is to
// nearest, ties to even; a NaN stays one.
struct BFloat16 {
    uint16_t bits;
};

struct Half {
    uint16_t bits;
};

inline float load(float value) { return value; }

inline float load(BFloat16 value) { return float_of(uint32_t(value.bits) << 16); }

// A half's exponent and mantissa moved into a float's place read as value * 2^-112: exact, subnormals included.
inline float load(Half value) {
    const uint32_t magnitude = value.bits & 0x7fffu;
    const uint32_t sign = uint32_t(value.bits & 0x8000u) << 16;
    const uint32_t finite = bits_of(float_of(magnitude << 13) * 0x1p112f);
    const uint32_t special = (magnitude << 13) | 0x7f800000u;
    return float_of((magnitude >= 0x7c00u ? special : finite) | sign);
}

inline void store(BFloat16* place, float value) {
    const uint32_t bits = bits_of(value);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    place->bits = uint16_t((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

// Subnormal halves: adding 0.5 leaves their units in the last place of the sum, rounded by the addition itself.
inline void store(Half* place, float value) {
    const uint32_t sign = (bits_of(value) >> 16) & 0x8000u;
    const uint32_t bits = bits_of(value) & 0x7fffffffu;
    const uint32_t normal = (bits - 0x38000000u + 0xfffu + ((bits >> 13) & 1u)) >> 13;
    const uint32_t subnormal = bits_of(float_of(bits) + 0.5f) - 0x3f000000u;
    uint32_t half = bits < 0x38800000u ? subnormal : normal;
    half = bits >= 0x477ff000u ? 0x7c00u : half;  // from 65520 on: infinite
    half = bits > 0x7f800000u ? 0x7e00u : half;
    place->bits = uint16_t(half | sign);
}

struct Nothing {};
inline void store(Nothing*, float) {}

enum Decay { NONE, COUPLED, DECOUPLED };

// Elements whose square roots are taken at a time, on the stack.
constexpr int32_t BLOCK = 256;

}  // namespace

extern "C" {

// MKL's vmsSqrt by its Fortran name: (count, values, roots, mode).
typedef void Roots(const int32_t*, const float*, float*, const int64_t*);

// As `_Scalars` in cpu_adam.py: each a Python float rounded to fp32, where torch rounds it.
struct Scalars {
    float factor;       // on the gradient
    float decay;        // coupled: weight_decay; decoupled: 1 - lr * weight_decay
    float to_gradient;  // 1 - beta1
    float beta2;
    float from_square;  // 1 - beta2
    float correction;   // sqrt(1 - beta2 ** step)
    float eps;
    float step_size;    // -lr / (1 - beta1 ** step)
};

}  // extern "C"

namespace {

// Square roots by the library that torch takes them from, or by the CPU's instruction.
void take_roots(Roots* roots, float* values, int32_t count) {
    if (roots != nullptr) {
        const int64_t high_accuracy = 0x2 | 0x140000 | 0x100;  // as torch calls it; denormals kept, no error handler
        roots(&count, values, values, &high_accuracy);
    } else {
        for (int32_t i = 0; i < count; ++i) values[i] = std::sqrt(values[i]);
    }
}

template <int DECAY, class Gradient, class Out>
void update(float* __restrict master, const Gradient* __restrict grad, float* __restrict exp_avg,
            float* __restrict exp_avg_sq, Out* __restrict out, int64_t numel, const Scalars s, Roots* roots) {
    // torch.lerp goes from the nearer end, so that it arrives exactly.
    const bool nearer_start = std::fabs(s.to_gradient) < 0.5f;
    const float weight = nearer_start ? s.to_gradient : s.to_gradient - 1.0f;
    float root[BLOCK];
    for (int64_t first = 0; first < numel; first += BLOCK) {
        const int32_t count = int32_t(numel - first < BLOCK ? numel - first : BLOCK);
        float* __restrict p = master + first;
        float* __restrict m = exp_avg + first;
        float* __restrict v = exp_avg_sq + first;
        for (int32_t i = 0; i < count; ++i) {
            float g = load(grad[first + i]) * s.factor;
            if (DECAY == COUPLED) g = fused(p[i], s.decay, g);
            m[i] = fused(weight, g - m[i], nearer_start ? m[i] : g);
            v[i] = root[i] = fused(s.from_square * g, g, v[i] * s.beta2);
        }
        take_roots(roots, root, count);
        for (int32_t i = 0; i < count; ++i) {
            const float decayed = DECAY == DECOUPLED ? p[i] * s.decay : p[i];
            p[i] = decayed + s.step_size * m[i] / (root[i] / s.correction + s.eps);
            store(out + first + i, p[i]);
        }
    }
}

template <class Gradient, class Out>
void by_decay(int decay, float* master, const void* grad, float* exp_avg, float* exp_avg_sq, void* out, int64_t numel,
              const Scalars& s, Roots* roots) {
    const auto run = decay == NONE      ? update<NONE, Gradient, Out>
                     : decay == COUPLED ? update<COUPLED, Gradient, Out>
                                        : update<DECOUPLED, Gradient, Out>;
    run(master, static_cast<const Gradient*>(grad), exp_avg, exp_avg_sq, static_cast<Out*>(out), numel, s,
        roots);
}

}  // namespace

// `names` of dtypes: 0 none (of `out` alone), 1 fp32 (of `grad` alone), 2 bf16, 3 fp16.
extern "C" void zero_cpu_adam(float* master, const void* grad, float* exp_avg, float* exp_avg_sq, void* out,
                              int64_t numel, int grad_dtype, int out_dtype, int decay, const Scalars* s,
                              Roots* roots) {
    const auto with = [&](auto run) { run(decay, master, grad, exp_avg, exp_avg_sq, out, numel, *s, roots); };
    const auto with_out = [&](auto none, auto bf16, auto fp16) {
        with(out_dtype == 2 ? bf16 : out_dtype == 3 ? fp16 : none);
    };
    if (grad_dtype == 2)
        with_out(by_decay<BFloat16, Nothing>, by_decay<BFloat16, BFloat16>, by_decay<BFloat16, Half>);
    else if (grad_dtype == 3)
        with_out(by_decay<Half, Nothing>, by_decay<Half, BFloat16>, by_decay<Half, Half>);
    else
        with_out(by_decay<float, Nothing>, by_decay<float, BFloat16>, by_decay<float, Half>);
}
