// Adam on host memory in one pass; built and called by cpu_adam.py, which says what is computed and to which bits.
//
// No header of torch or Python, so that it compiles in a second or two. Every operation is one IEEE fp32 operation in
// torch's order, and `fused` stands where torch's own kernels fuse; with -ffp-contract=off nothing else is fused.
// Vector bodies and scalar tails of the compiler's loops thus give the same bits, wherever a piece begins or ends.

#include <cmath>
#include <cstdint>
#include <cstring>
#ifdef __F16C__
#include <immintrin.h>
#endif

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

// fp16 in blocks, since compilers do not choose its instruction for integers, where there is one.
void widen(const Half* from, float* to, int64_t numel) {
    int64_t i = 0;
#ifdef __F16C__
    for (; i + 8 <= numel; i += 8)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
#endif
    for (; i < numel; ++i) to[i] = load(from[i]);
}

void narrow(const float* from, Half* to, int64_t numel) {
    int64_t i = 0;
#ifdef __F16C__
    for (; i + 8 <= numel; i += 8)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                         _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
#endif
    for (; i < numel; ++i) store(to + i, from[i]);
}

enum Dtype { NO_COPY, FP32, BF16, FP16 };
enum Decay { NONE, COUPLED, DECOUPLED };

}  // namespace

// MKL's vmsSqrt by its Fortran name: (count, values, roots, mode).
extern "C" typedef void Roots(const int32_t*, const float*, float*, const int64_t*);

// As `_Scalars` in cpu_adam.py: each a Python float rounded to fp32, where torch rounds it.
extern "C" struct Scalars {
    float factor;       // on the gradient
    float decay;        // coupled: weight_decay; decoupled: 1 - lr * weight_decay
    float to_gradient;  // 1 - beta1
    float beta2;
    float from_square;  // 1 - beta2
    float correction;   // sqrt(1 - beta2 ** step)
    float eps;
    float step_size;    // -lr / (1 - beta1 ** step)
    Roots* roots;       // where torch takes square roots from; null: the CPU's instruction
};

namespace {

// Elements that are done together: what is read again is in the L1 cache.
constexpr int32_t BLOCK = 256;

void take_roots(Roots* roots, float* values, int32_t count) {
    uint32_t any = 0;
    for (int32_t i = 0; i < count; ++i) any |= bits_of(values[i]);
    if (any == 0) return;  // as rows of an embedding that no token used; MKL is slow on zeros
    if (roots != nullptr) {
        const int64_t mode = 0x2 | 0x140000 | 0x100;  // as torch calls it: accurate, denormals kept, no error handler
        roots(&count, values, values, &mode);
    } else {
        for (int32_t i = 0; i < count; ++i) values[i] = std::sqrt(values[i]);
    }
}

template <int DECAY, class Gradient, class Out>
void update(float* __restrict master, const void* gradients, float* __restrict exp_avg, float* __restrict exp_avg_sq,
            void* copy, int64_t numel, const Scalars s) {
    const Gradient* __restrict grad = static_cast<const Gradient*>(gradients);
    Out* __restrict out = static_cast<Out*>(copy);
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
        take_roots(s.roots, root, count);
        for (int32_t i = 0; i < count; ++i) {
            const float decayed = DECAY == DECOUPLED ? p[i] * s.decay : p[i];
            p[i] = decayed + s.step_size * m[i] / (root[i] / s.correction + s.eps);
            store(out + first + i, p[i]);
        }
    }
}

using Update = decltype(&update<NONE, float, Nothing>);

template <class Gradient, class Out>
Update by_decay(int decay) {
    if (decay == NONE) return update<NONE, Gradient, Out>;
    return decay == COUPLED ? update<COUPLED, Gradient, Out> : update<DECOUPLED, Gradient, Out>;
}

}  // namespace

// `grad_dtype`, `out_dtype`: a Dtype; `decay`: a Decay.
extern "C" void zero_cpu_adam(float* master, const void* grad, float* exp_avg, float* exp_avg_sq, void* out,
                              int64_t numel, int grad_dtype, int out_dtype, int decay, const Scalars* s) {
    const bool bf16_in = grad_dtype == BF16, bf16_out = out_dtype == BF16;
    const Update run = bf16_in ? bf16_out ? by_decay<BFloat16, BFloat16>(decay) : by_decay<BFloat16, Nothing>(decay)
                               : bf16_out ? by_decay<float, BFloat16>(decay) : by_decay<float, Nothing>(decay);
    if (grad_dtype != FP16 && out_dtype != FP16) return run(master, grad, exp_avg, exp_avg_sq, out, numel, *s);
    const int64_t grad_size = grad_dtype == FP32 ? 4 : 2;
    float wide[BLOCK];
    for (int64_t start = 0; start < numel; start += BLOCK) {
        const int64_t length = numel - start < BLOCK ? numel - start : BLOCK;
        const void* from = static_cast<const char*>(grad) + start * grad_size;
        void* to = static_cast<char*>(out) + start * 2;
        if (grad_dtype == FP16) widen(static_cast<const Half*>(from), wide, length);
        run(master + start, grad_dtype == FP16 ? wide : from, exp_avg + start, exp_avg_sq + start, to, length, *s);
        if (out_dtype == FP16) narrow(master + start, static_cast<Half*>(to), length);
    }
}
