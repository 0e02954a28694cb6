// Adam on host memory in one pass; compiled and called by cpu_adam.py, which says what is computed and to which bits.
//
// No header of torch or Python, so that it compiles in a second. Every operation is one IEEE fp32 operation in torch's
// order, and `fused` stands where torch's own kernels fuse; with -ffp-contract=off nothing else is fused. Vector bodies
// and scalar tails of the compiler's loops thus give the same bits, wherever a piece begins or ends.

#include <cmath>
#include <cstdint>
#include <cstring>

// MKL's vmsSqrt by its Fortran name: (count, values, roots, mode).
extern "C" typedef void Roots(const int32_t*, const float*, float*, const int64_t*);

// As `_Scalars` in cpu_adam.py: each a Python float rounded to fp32, where torch rounds it.
extern "C" struct Scalars {
    float factor;       // on the gradient
    float l2;           // coupled weight decay, else 0
    float shrink;       // decoupled: 1 - lr * weight_decay, else 1
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

struct BFloat16 {
    uint16_t bits;
};

inline uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float load(float value) { return value; }

inline float load(BFloat16 value) {
    const uint32_t bits = uint32_t(value.bits) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

// To nearest, ties to even; a NaN stays one. Without branches, so that the compiler vectorises it on any CPU.
inline BFloat16 rounded(float value) {
    const uint32_t bits = bits_of(value);
    const uint32_t nearest = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return {uint16_t((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : nearest)};
}

// a * b + c, rounded once where torch's kernels do so: not on CPUs without the instruction, or where torch is told to
// leave it out.
inline float fused(float a, float b, float c) { return TORCH_FUSES ? __builtin_fmaf(a, b, c) : a * b + c; }

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

template <class Gradient>
void update(float* __restrict master, const Gradient* __restrict grad, float* __restrict exp_avg,
            float* __restrict exp_avg_sq, BFloat16* __restrict out, int64_t numel, const Scalars s) {
    // torch.lerp goes from the nearer end, so that it arrives exactly.
    const bool nearer_start = std::fabs(s.to_gradient) < 0.5f;
    const float weight = nearer_start ? s.to_gradient : s.to_gradient - 1.0f;
    float root[BLOCK];
    for (int64_t first = 0; first < numel; first += BLOCK) {
        const int32_t count = int32_t(numel - first < BLOCK ? numel - first : BLOCK);
        float* __restrict p = master + first;
        const Gradient* __restrict gradient = grad + first;
        float* __restrict m = exp_avg + first;
        float* __restrict v = exp_avg_sq + first;
        for (int32_t i = 0; i < count; ++i) {
            float g = load(gradient[i]) * s.factor;
            if (s.l2 != 0.0f) g = fused(p[i], s.l2, g);
            m[i] = fused(weight, g - m[i], nearer_start ? m[i] : g);
            v[i] = root[i] = fused(s.from_square * g, g, v[i] * s.beta2);
        }
        take_roots(s.roots, root, count);
        BFloat16* __restrict copy = out == nullptr ? nullptr : out + first;
        for (int32_t i = 0; i < count; ++i) {
            p[i] = p[i] * s.shrink + s.step_size * m[i] / (root[i] / s.correction + s.eps);
            if (out != nullptr) copy[i] = rounded(p[i]);
        }
    }
}

}  // namespace

// `grad`: bf16 if `grad_is_bf16`, else fp32. `out` may be null.
extern "C" void zero_cpu_adam(float* master, const void* grad, float* exp_avg, float* exp_avg_sq, void* out,
                              int64_t numel, int grad_is_bf16, const Scalars* s) {
    BFloat16* copy = static_cast<BFloat16*>(out);
    if (grad_is_bf16)
        update(master, static_cast<const BFloat16*>(grad), exp_avg, exp_avg_sq, copy, numel, *s);
    else
        update(master, static_cast<const float*>(grad), exp_avg, exp_avg_sq, copy, numel, *s);
}
