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

// Elements that are computed at a time, and moments in 8 bits that share a scale; as in adam8bit.py.
constexpr int32_t BLOCK = 256;

enum Type { NONE = 0, BFLOAT16 = 1, HALF = 2 };

#ifdef __F16C__
typedef short Halves __attribute__((vector_size(16)));
typedef float Floats __attribute__((vector_size(32)));
#endif

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

inline float of_bfloat16(uint16_t value) { return float_of(uint32_t(value) << 16); }

// Exponents of fp16 are biased by 15, those of fp32 by 127. Infinities and NaN have the largest one of their type.
inline float of_half(uint16_t value) {
    const uint32_t size = value & 0x7fffu;
    const uint32_t normal = (size << 13) + ((127u - 15u) << (size < 0x7c00u ? 23 : 24));
    const uint32_t subnormal = bits_of(float(int32_t(size)) * (1.0f / 16777216.0f));
    return float_of((size < 0x0400u ? subnormal : normal) | uint32_t(value & 0x8000u) << 16);
}

// These round to nearest, ties to even; a NaN stays one. Without branches, so that the compiler vectorises them on any
// CPU.
inline uint16_t to_bfloat16(float value) {
    const uint32_t bits = bits_of(value);
    const uint32_t nearest = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return uint16_t((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : nearest);
}

inline uint16_t to_half(float value) {
    const uint32_t bits = bits_of(value), size = bits & 0x7fffffffu;
    const uint32_t normal = (size - ((127u - 15u) << 23) + 0xfffu + ((size >> 13) & 1u)) >> 13;
    // The sum has the last place of fp16's subnormals, to which it is rounded.
    const uint32_t subnormal = bits_of(float_of(size) + 0.5f) - bits_of(0.5f);
    const uint32_t finite = size < ((127u - 14u) << 23) ? subnormal : normal;
    const uint32_t nearest = size < ((127u + 16u) << 23) ? finite : size > 0x7f800000u ? 0x7e00u : 0x7c00u;
    return uint16_t(nearest | (bits >> 16 & 0x8000u));
}

// Both convert at most BLOCK numbers. x86 CPUs have instructions for fp16, which compilers do not find in a loop.
void widen(Type type, const uint16_t* __restrict from, float* __restrict to, int32_t count) {
    int32_t i = 0;
    if (type == BFLOAT16) {
        for (; i < count; ++i) to[i] = of_bfloat16(from[i]);
        return;
    }
#ifdef __F16C__
    for (Halves eight; i + 8 <= count; i += 8) {
        std::memcpy(&eight, from + i, sizeof eight);
        const auto wide = __builtin_ia32_vcvtph2ps256(eight);
        std::memcpy(to + i, &wide, sizeof wide);
    }
#endif
    for (; i < count; ++i) to[i] = of_half(from[i]);
}

void narrow(Type type, const float* __restrict from, uint16_t* __restrict to, int32_t count) {
    int32_t i = 0;
    if (type == BFLOAT16) {
        for (; i < count; ++i) to[i] = to_bfloat16(from[i]);
        return;
    }
#ifdef __F16C__
    for (Floats eight; i + 8 <= count; i += 8) {
        std::memcpy(&eight, from + i, sizeof eight);
        const auto nearest = __builtin_ia32_vcvtps2ph256(eight, 0);
        std::memcpy(to + i, &nearest, sizeof nearest);
    }
#endif
    for (; i < count; ++i) to[i] = to_half(from[i]);
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
inline float scaled(float gradient, float p, const Scalars& s) {
    const float g = gradient * s.factor, decayed = fused(p, s.l2, g);
    return s.l2 != 0.0f ? decayed : g;
}

inline float squares(float v, float g, const Scalars& s) { return fused(s.from_square * g, g, v * s.beta2); }

inline float updated(float p, float m, float root, const Scalars& s) {
    return p * s.shrink + s.step_size * m / (root / s.correction + s.eps);
}

void update(float* __restrict master, const float* __restrict grad, float* __restrict exp_avg,
            float* __restrict exp_avg_sq, int32_t count, const Scalars s) {
    const Lerp lerp(s.to_gradient);
    for (int32_t i = 0; i < count; ++i) {
        const float g = scaled(grad[i], master[i], s);
        exp_avg[i] = lerp(exp_avg[i], g);
        exp_avg_sq[i] = squares(exp_avg_sq[i], g, s);
        master[i] = updated(master[i], exp_avg[i], std::sqrt(exp_avg_sq[i]), s);
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

// Those of a step, by the place in a block.
struct Thresholds {
    float of_first[BLOCK], of_second[BLOCK];

    explicit Thresholds(uint32_t step) {
        for (uint32_t i = 0; i < BLOCK; ++i) {
            const uint32_t turn = step + i * OF_PLACE;
            of_first[i] = threshold(turn + OF_FIRST);
            of_second[i] = threshold(turn);
        }
    }
};

// The same for a block of moments as codes; see adam8bit.py. Magnitudes are ordered as their bits, whose maximum the
// compiler vectorises.
void update_coded(float* __restrict p, const float* __restrict grad, int8_t* __restrict code, float& scale,
                  uint8_t* __restrict code_sq, float& scale_sq, int32_t count, const Scalars s,
                  const Thresholds& t) {
    const Lerp lerp(s.to_gradient);
    const float of_code = scale, of_code_sq = scale_sq;
    float m[BLOCK], v[BLOCK], root[BLOCK];
    for (int32_t i = 0; i < count; ++i) {
        const float g = scaled(grad[i], p[i], s), ratio = float(code[i]) * (1.0f / 127.0f);
        const float power = power4(float(code_sq[i]) * (1.0f / 255.0f));
        m[i] = lerp(std::copysign(power4(ratio), ratio) * of_code, g);
        v[i] = squares(power * power * of_code_sq, g, s);
        root[i] = std::sqrt(v[i]);
        p[i] = updated(p[i], m[i], root[i], s);
    }
    uint32_t top = LEAST_NORMAL, top_sq = LEAST_NORMAL;
    for (int32_t i = 0; i < count; ++i) {
        const uint32_t bits = finite_bits(m[i], v[i]), bits_sq = finite_bits(v[i], m[i]);
        top = top > bits ? top : bits;
        top_sq = top_sq > bits_sq ? top_sq : bits_sq;
    }
    scale = float_of(top);
    scale_sq = float_of(top_sq);
    const float inverse = 1.0f / root4(scale), inverse_sq = 1.0f / std::sqrt(root4(scale_sq));
    for (int32_t i = 0; i < count; ++i) {
        const float size = root4(float_of(finite_bits(m[i], v[i]))) * inverse * 127.0f + t.of_first[i];
        const int32_t magnitude = int32_t(size < 127.0f ? size : 127.0f);
        code[i] = int8_t(m[i] < 0.0f ? -magnitude : magnitude);
        const float deviation = float_of(finite_bits(root[i], m[i]));
        const float size_sq = root4(deviation) * inverse_sq * 255.0f + t.of_second[i];
        const int32_t above_zero = size_sq < 1.0f ? 1 : int32_t(size_sq < 255.0f ? size_sq : 255.0f);
        code_sq[i] = uint8_t(deviation > 0.0f ? above_zero : 0);
    }
}

}  // namespace

// `grad` and `out` are of a `Type`, or `grad` is fp32 and there is no `out`. Moments are fp32 without scales, else codes.
// Up to `threads` threads take pieces of `piece` elements (a multiple of BLOCK), so that a thread on a busy core takes
// fewer. They are this function's own: Python's would need its lock for each piece, and would take it from the thread
// that gives work to a GPU.
extern "C" void zero_cpu_adam(float* master, const void* grad, void* exp_avg, void* exp_avg_sq, uint16_t* out,
                              float* scales, float* scales_sq, int64_t numel, int grad_type, int out_type,
                              const Scalars* s, int64_t piece, int threads) {
    const Thresholds thresholds(s->turn);
    const auto update_block = [&](int64_t first, int32_t count) {
        float wide[BLOCK];
        const float* gradient = wide;
        if (grad_type == NONE)
            gradient = static_cast<const float*>(grad) + first;
        else
            widen(Type(grad_type), static_cast<const uint16_t*>(grad) + first, wide, count);
        if (scales != nullptr)
            update_coded(master + first, gradient, static_cast<int8_t*>(exp_avg) + first, scales[first / BLOCK],
                         static_cast<uint8_t*>(exp_avg_sq) + first, scales_sq[first / BLOCK], count, *s,
                         thresholds);
        else
            update(master + first, gradient, static_cast<float*>(exp_avg) + first,
                   static_cast<float*>(exp_avg_sq) + first, count, *s);
        if (out_type != NONE) narrow(Type(out_type), master + first, out + first, count);
    };
    std::atomic<int64_t> next{0};
    const auto work = [&] {
        for (int64_t first = next.fetch_add(piece); first < numel; first = next.fetch_add(piece)) {
            const int64_t last = numel - first < piece ? numel : first + piece;
            for (int64_t at = first; at < last; at += BLOCK)
                update_block(at, int32_t(last - at < BLOCK ? last - at : BLOCK));
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
