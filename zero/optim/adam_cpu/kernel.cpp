// Adam on host memory in one pass; compiled by build.py and called by __init__.py, which says what is computed and to which bits.
//
// No header of torch or Python, so that it compiles in seconds. Every operation is one IEEE fp32 operation in torch's
// order, and `fused` stands where torch's own kernels fuse; with -ffp-contract=off nothing else is fused. Vector bodies
// and scalar tails of the compiler's loops thus give the same bits, wherever a piece begins or ends.

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <exception>
#include <thread>
#include <vector>

// As `_Scalars` in __init__.py: each a Python float rounded to fp32, where torch rounds it.
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
    uint32_t turn;      // the step's part of the thresholds; see adam8bit.py
};

namespace {

// Moments in 8 bits that share a scale; as in adam8bit.py.
constexpr int32_t BLOCK = 256;

struct BFloat16 {
    uint16_t bits;
};

struct Half {
    uint16_t bits;
};

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

inline float load(float value) { return value; }

inline float load(BFloat16 value) { return float_of(uint32_t(value.bits) << 16); }

// Exponents of fp16 are biased by 15, those of fp32 by 127. Infinities and NaN have the largest one of their type.
inline float load(Half value) {
    const uint32_t size = value.bits & 0x7fffu;
    const uint32_t normal = (size << 13) + ((127u - 15u) << (size < 0x7c00u ? 23 : 24));
    const uint32_t subnormal = bits_of(float(int32_t(size)) * (1.0f / 16777216.0f));
    return float_of((size < 0x0400u ? subnormal : normal) | uint32_t(value.bits & 0x8000u) << 16);
}

// These round to nearest, ties to even; a NaN stays one. Without branches, so that the compiler vectorises them on any
// CPU.
inline void store(float value, BFloat16* place) {
    const uint32_t bits = bits_of(value);
    const uint32_t nearest = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    place->bits = uint16_t((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : nearest);
}

inline void store(float value, Half* place) {
    const uint32_t bits = bits_of(value), size = bits & 0x7fffffffu;
    const uint32_t normal = (size - ((127u - 15u) << 23) + 0xfffu + ((size >> 13) & 1u)) >> 13;
    // The sum has the last place of fp16's subnormals, to which it is rounded.
    const uint32_t subnormal = bits_of(float_of(size) + 0.5f) - bits_of(0.5f);
    const uint32_t finite = size < ((127u - 14u) << 23) ? subnormal : normal;
    const uint32_t nearest = size < ((127u + 16u) << 23) ? finite : size > 0x7f800000u ? 0x7e00u : 0x7c00u;
    place->bits = uint16_t(nearest | (bits >> 16 & 0x8000u));
}

// a * b + c, rounded once where torch's kernels do so: not on CPUs without the instruction, or where torch is told to
// leave it out.
inline float fused(float a, float b, float c) { return TORCH_FUSES ? __builtin_fmaf(a, b, c) : a * b + c; }

// torch.lerp goes from the nearer end, so that it arrives exactly.
struct Lerp {
    bool nearer_start;
    float weight;

    explicit Lerp(float to_gradient)
        : nearer_start(std::fabs(to_gradient) < 0.5f), weight(nearer_start ? to_gradient : to_gradient - 1.0f) {}

    float operator()(float m, float g) const { return fused(weight, g - m, nearer_start ? m : g); }
};

// Both are computed, because compilers vectorise a loop with a branch for few CPUs.
template <class Gradient>
inline float scaled(Gradient gradient, float p, const Scalars& s) {
    const float g = load(gradient) * s.factor, decayed = fused(p, s.l2, g);
    return s.l2 != 0.0f ? decayed : g;
}

inline float squares(float v, float g, const Scalars& s) { return fused(s.from_square * g, g, v * s.beta2); }

inline float updated(float p, float m, float root, const Scalars& s) {
    return p * s.shrink + s.step_size * m / (root / s.correction + s.eps);
}

struct None {};

// There is nothing to write for `None`.
inline void store(float, None*) {}

template <class Gradient, class Copy>
void update(float* __restrict master, const Gradient* __restrict grad, float* __restrict exp_avg,
            float* __restrict exp_avg_sq, Copy* __restrict out, int64_t numel, const Scalars s) {
    const Lerp lerp(s.to_gradient);
    for (int64_t i = 0; i < numel; ++i) {
        const float g = scaled(grad[i], master[i], s);
        exp_avg[i] = lerp(exp_avg[i], g);
        exp_avg_sq[i] = squares(exp_avg_sq[i], g, s);
        master[i] = updated(master[i], exp_avg[i], std::sqrt(exp_avg_sq[i]), s);
        store(master[i], out + i);
    }
}

inline float power4(float value) {
    const float square = value * value;
    return square * square;
}

inline float root4(float value) { return std::sqrt(std::sqrt(value)); }

constexpr uint32_t OF_PLACE = 0x85ebca6bu, OF_FIRST = 0x5bd1e995u;  // these three as in adam8bit.py
constexpr float EDGE = 1.0f / 4096.0f;
constexpr uint32_t MAGNITUDE = 0x7fffffffu, INFINITE = 0x7f800000u, LEAST_NORMAL = 0x00800000u;

// The bits of a moment's magnitude; 0 if this moment or the other one is not finite.
inline uint32_t finite_bits(float moment, float other) {
    const uint32_t bits = bits_of(moment) & MAGNITUDE, others = bits_of(other) & MAGNITUDE;
    return bits & uint32_t(int32_t((bits - INFINITE) & (others - INFINITE)) >> 31);  // the sign bit, in all places
}

// What is added to a code before the fraction is cut off.
inline float threshold(uint32_t turn) {
    const float share = float(turn >> 16) * (1.0f / 65536.0f);
    return share < EDGE ? EDGE : share > 1.0f - EDGE ? 1.0f - EDGE : share;
}

// The same with moments as codes; see adam8bit.py. Magnitudes are ordered as their bits, whose maximum the compiler
// vectorises.
template <class Gradient, class Copy>
void update_coded(float* __restrict master, const Gradient* __restrict grad, int8_t* __restrict exp_avg,
                  float* __restrict scales, uint8_t* __restrict exp_avg_sq, float* __restrict scales_sq,
                  Copy* __restrict out, int64_t numel, const Scalars s) {
    const Lerp lerp(s.to_gradient);
    float m[BLOCK], v[BLOCK], root[BLOCK];
    for (int64_t first = 0; first < numel; first += BLOCK) {
        const int32_t count = int32_t(numel - first < BLOCK ? numel - first : BLOCK);
        float* __restrict p = master + first;
        const Gradient* __restrict gradient = grad + first;
        int8_t* __restrict code = exp_avg + first;
        uint8_t* __restrict code_sq = exp_avg_sq + first;
        Copy* __restrict copy = out + first;
        const float scale = *scales, scale_sq = *scales_sq;
        for (int32_t i = 0; i < count; ++i) {
            const float g = scaled(gradient[i], p[i], s), ratio = float(code[i]) * (1.0f / 127.0f);
            const float power = power4(float(code_sq[i]) * (1.0f / 255.0f));
            m[i] = lerp(std::copysign(power4(ratio), ratio) * scale, g);
            v[i] = squares(power * power * scale_sq, g, s);
            root[i] = std::sqrt(v[i]);
            p[i] = updated(p[i], m[i], root[i], s);
            store(p[i], copy + i);
        }
        uint32_t top = LEAST_NORMAL, top_sq = LEAST_NORMAL;
        for (int32_t i = 0; i < count; ++i) {
            const uint32_t bits = finite_bits(m[i], v[i]), bits_sq = finite_bits(v[i], m[i]);
            top = top > bits ? top : bits;
            top_sq = top_sq > bits_sq ? top_sq : bits_sq;
        }
        *scales = float_of(top);
        *scales_sq = float_of(top_sq);
        const float inverse = 1.0f / root4(*scales++), inverse_sq = 1.0f / std::sqrt(root4(*scales_sq++));
        for (int32_t i = 0; i < count; ++i) {
            const uint32_t turn = s.turn + uint32_t(i) * OF_PLACE;
            const float size = root4(float_of(finite_bits(m[i], v[i]))) * inverse * 127.0f + threshold(turn + OF_FIRST);
            const int32_t magnitude = int32_t(size < 127.0f ? size : 127.0f);
            code[i] = int8_t(m[i] < 0.0f ? -magnitude : magnitude);
            const float deviation = float_of(finite_bits(root[i], m[i]));
            const float size_sq = root4(deviation) * inverse_sq * 255.0f + threshold(turn);
            const int32_t above_zero = size_sq < 1.0f ? 1 : int32_t(size_sq < 255.0f ? size_sq : 255.0f);
            code_sq[i] = uint8_t(deviation > 0.0f ? above_zero : 0);
        }
    }
}

}  // namespace

// `grad` and `out` are of these types: 0 is fp32 (of `out`: there is none), 1 bf16, 2 fp16. Moments are fp32
// without scales, else codes; then `piece` is a multiple of BLOCK. Up to `threads` threads take pieces of this many
// elements, so that a thread on a busy core takes fewer. They are this function's own: Python's would need its lock for
// each piece, and would take it from the thread that gives work to a GPU.
extern "C" void zero_cpu_adam(float* master, const void* grad, void* exp_avg, void* exp_avg_sq, void* out,
                              float* scales, float* scales_sq, int64_t numel, int grad_type, int out_type,
                              const Scalars* s, int64_t piece, int threads) {
    const auto update_piece = [&](const auto* gradient, auto* copy, int64_t first) {
        const int64_t count = numel - first < piece ? numel - first : piece;
        if (scales != nullptr)
            update_coded(master + first, gradient + first, static_cast<int8_t*>(exp_avg) + first,
                         scales + first / BLOCK, static_cast<uint8_t*>(exp_avg_sq) + first, scales_sq + first / BLOCK,
                         copy + first, count, *s);
        else
            update(master + first, gradient + first, static_cast<float*>(exp_avg) + first,
                   static_cast<float*>(exp_avg_sq) + first, copy + first, count, *s);
    };
    const auto with_gradient = [&](const auto* gradient, int64_t first) {
        if (out_type == 0)
            update_piece(gradient, static_cast<None*>(out), first);
        else if (out_type == 1)
            update_piece(gradient, static_cast<BFloat16*>(out), first);
        else
            update_piece(gradient, static_cast<Half*>(out), first);
    };
    std::atomic<int64_t> next{0};
    const auto work = [&] {
        for (int64_t first = next.fetch_add(piece); first < numel; first = next.fetch_add(piece)) {
            if (grad_type == 0)
                with_gradient(static_cast<const float*>(grad), first);
            else if (grad_type == 1)
                with_gradient(static_cast<const BFloat16*>(grad), first);
            else
                with_gradient(static_cast<const Half*>(grad), first);
        }
    };
    std::vector<std::thread> helpers;
    try {
        for (int64_t first = piece; first < numel && int(helpers.size()) < threads - 1; first += piece)
            helpers.emplace_back(work);
    } catch (const std::exception&) {
        // The system gives no more threads: those that there are do all.
    }
    work();
    for (std::thread& each : helpers) each.join();
}
