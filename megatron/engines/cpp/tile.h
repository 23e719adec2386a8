// Vectors of floats, exp2, and the M x N-vector product that all of the attention is made of.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int VL = 16, MAX_N = 4;  // lanes of a vector; vectors of a tile: 6 x 4 of 32 registers
#elif defined(__AVX__)
constexpr int VL = 8, MAX_N = 2;  // 6 x 2 of 16 registers
#elif defined(__aarch64__)
constexpr int VL = 4, MAX_N = 4;
#else
constexpr int VL = 4, MAX_N = 2;
#endif
constexpr int M = 6;                // rows of a tile
constexpr int PANEL = MAX_N * VL;   // columns of a tile

#define ALWAYS_INLINE inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(VL * 4)));
typedef int vi __attribute__((vector_size(VL * 4)));
typedef unsigned vu __attribute__((vector_size(VL * 4)));

ALWAYS_INLINE vf load(const float* p) {
  vf x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
ALWAYS_INLINE void store(float* p, vf x) { std::memcpy(p, &x, sizeof x); }
ALWAYS_INLINE vf splat(float x) { return x - vf{}; }
ALWAYS_INLINE vf larger(vf a, vf b) { return a > b ? a : b; }  // b if either is NaN
#if defined(__AVX512F__)
inline float sum(vf x) { return _mm512_reduce_add_ps(reinterpret_cast<__m512>(x)); }
inline float largest(vf x) { return _mm512_reduce_max_ps(reinterpret_cast<__m512>(x)); }
#else
inline float sum(vf x) {
  float total = 0.0f;
  for (int i = 0; i < VL; ++i) total += x[i];
  return total;
}
inline float largest(vf x) {
  float top = x[0];
  for (int i = 1; i < VL; ++i) top = x[i] > top ? x[i] : top;
  return top;
}
#endif

inline vi lanes_before(int n) {  // true in the first n lanes
  vi lane;
  for (int i = 0; i < VL; ++i) lane[i] = i;
  return lane < n;
}

// True for those of the VL keys from `key` on whose weight dropout keeps: `kept` of dropout.py.
// `row` is the query's number, of `row_keys`.
ALWAYS_INLINE vi kept_lanes(uint64_t row, uint32_t key, int32_t threshold) {
  vu x;
  for (int i = 0; i < VL; ++i) x[i] = i * 0x9E3779B9u;
  x += key * 0x9E3779B9u + static_cast<uint32_t>(row);
  x = (x ^ x >> 16) * 0x85EBCA6Bu + static_cast<uint32_t>(row >> 32);
  x = (x ^ x >> 13) * 0xC2B2AE35u;
  return reinterpret_cast<vi>(x) >= threshold;
}

// 2^f to 1 ulp for |f| <= 0.5.
ALWAYS_INLINE vf exp2_fraction(vf f) {
  vf y = splat(0.00015345811f);
  y = y * f + splat(0.0013399931f);
  y = y * f + splat(0.0096184891f);
  y = y * f + splat(0.055503286f);
  y = y * f + splat(0.24022646f);
  y = y * f + splat(0.69314718f);
  return y * f + splat(1.0f);
}

// 2^x to 1 ulp for x <= 100; 0 below 2^-100, which no float32 sum of ours can see. NaN stays NaN.
#if defined(__AVX512F__)
ALWAYS_INLINE vf exp2v(vf x) {
  const __m512 whole = _mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __mmask16 seen = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-100.0f), _CMP_NLT_UQ);
  return (vf)_mm512_maskz_scalef_ps(seen, (__m512)exp2_fraction(x - (vf)whole), whole);
}
#else
ALWAYS_INLINE vf exp2v(vf x) {
  const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const vf clamped = larger(splat(-100.0f), x);  // this way round, NaN stays NaN
  const vf shifted = clamped + magic;
  vf y = exp2_fraction(clamped - (shifted - magic));
  vi bits, exponent;
  std::memcpy(&bits, &y, sizeof y);
  std::memcpy(&exponent, &shifted, sizeof y);
  bits += exponent << 23;  // the bits of magic shift out
  std::memcpy(&y, &bits, sizeof y);
  return x < splat(-100.0f) ? vf{} : y;
}
#endif

// While it lives, this thread treats denormals as zero: steep weights and probabilities reach
// them, no result can show them, and on x86 each would cost a hundred cycles.
struct NoDenormals {
#if defined(__SSE2__)
  unsigned before = _mm_getcsr();
  NoDenormals() { _mm_setcsr(before | 0x8040); }
  ~NoDenormals() { _mm_setcsr(before); }
#else
  NoDenormals() {}
  ~NoDenormals() {}
#endif
};

template <int ROWS, int N, class F>
ALWAYS_INLINE void each(F f) {
#pragma GCC unroll 8
  for (int m = 0; m < ROWS; ++m)
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v) f(m, v);
}

// acc[m][v] += sum over k of left[m * left_row + k * left_k] * right[k * right_row + v * VL ...]
template <int N>
ALWAYS_INLINE void multiply(vf (&acc)[M][N], const float* left, long left_row, long left_k,
                            const float* right, long right_row, long k) {
  if (k < 1) __builtin_unreachable();  // else the sums pass through memory on their way out
  for (long i = 0; i < k; ++i) {
    vf b[N];
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v) b[v] = load(right + v * VL);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const vf a = splat(left[m * left_row]);
#pragma GCC unroll 8
      for (int v = 0; v < N; ++v) acc[m][v] += a * b[v];
    }
    left += left_k;
    right += right_row;
  }
}

// The same with pairs of bf16 in the place of floats, summed in fp32; k counts pairs.
#if defined(__AVX512BF16__)
constexpr bool HAS_BF16 = true;

template <int N>
ALWAYS_INLINE void multiply_pairs(vf (&acc)[M][N], const float* left, long left_row, long left_k,
                                  const float* right, long right_row, long k) {
  if (k < 1) __builtin_unreachable();
  for (long i = 0; i < k; ++i) {
    __m512bh b[N];
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v) b[v] = (__m512bh)_mm512_loadu_ps(right + v * VL);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const __m512bh a = (__m512bh)_mm512_set1_ps(left[m * left_row]);
#pragma GCC unroll 8
      for (int v = 0; v < N; ++v)
        acc[m][v] = (vf)_mm512_dpbf16_ps((__m512)acc[m][v], a, b[v]);
    }
    left += left_k;
    right += right_row;
  }
}

// VL numbers of a row of bf16.
ALWAYS_INLINE vf widened(const uint16_t* p) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
}

// 2 * VL numbers as VL pairs of neighbours.
ALWAYS_INLINE void store_pairs(float* out, vf low, vf high) {
  _mm512_storeu_ps(out, (__m512)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
}

// Numbers 2i and 2i + 1 as pair i; may be done in place.
inline void to_pairs_across(const float* in, long count, float* out) {
  for (long i = 0; i < count; i += 2 * VL) {
    const vf low = load(in + i), high = load(in + i + VL);
    store_pairs(out + i / 2, low, high);
  }
}

// Number i of `low` and number i of `high` as pair i.
ALWAYS_INLINE void store_pairs_of(float* out, vf low, vf high) {
  alignas(64) static const uint16_t order[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                 21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
  _mm512_storeu_si512(out, _mm512_permutexvar_epi16(_mm512_load_si512(order), both));
}

// Rows 2i and 2i + 1 of [rows, columns] as row i of pairs; may be done in place.
inline void to_pairs_down(const float* in, long rows, long columns, long row, float* out) {
  for (long i = 0; i < rows; i += 2)
    for (long c = 0; c < columns; c += VL) {
      const vf low = load(in + i * row + c), high = load(in + (i + 1) * row + c);
      store_pairs_of(out + i / 2 * row + c, low, high);
    }
}
#else
constexpr bool HAS_BF16 = false;

template <int N>
ALWAYS_INLINE void multiply_pairs(vf (&)[M][N], const float*, long, long, const float*, long, long) {}
inline vf widened(const uint16_t*) { return vf{}; }
inline void store_pairs(float*, vf, vf) {}
inline void store_pairs_of(float*, vf, vf) {}
inline void to_pairs_across(const float*, long, float*) {}
inline void to_pairs_down(const float*, long, long, long, float*) {}
#endif

// Calls f with the number of vectors, 1 .. MAX_N, as a compile-time constant.
template <class F>
inline void with_vectors(long n, F f) {
  switch (n) {
    case 1: f(std::integral_constant<int, 1>{}); break;
    case 2: f(std::integral_constant<int, 2>{}); break;
    case 3: if constexpr (MAX_N >= 3) f(std::integral_constant<int, 3>{}); break;
    default: f(std::integral_constant<int, MAX_N>{});
  }
}

template <class F>
__attribute__((noinline)) void apart(F f) {
  f();
}

// Calls f with two conditions as compile-time constants.
template <class F>
inline void with_flags(bool a, bool b, F f) {
  if (a) {
    if (b) f(std::true_type{}, std::true_type{});
    else f(std::true_type{}, std::false_type{});
  } else {
    if (b) f(std::false_type{}, std::true_type{});
    else f(std::false_type{}, std::false_type{});
  }
}

// out[m][0 .. dim) += left * right, for M rows; right and out have rows of dim.
template <bool PAIRS>
inline void accumulate(const float* left, long left_row, long left_k, const float* right, long dim,
                       long k, float* out) {
  for (long d = 0; d < dim; d += PANEL) {
    with_vectors((dim - d < PANEL ? dim - d : PANEL) / VL, [&](auto n) {
      constexpr int N = decltype(n)::value;
      vf acc[M][N];
      each<M, N>([&](int m, int v) { acc[m][v] = load(out + m * dim + d + v * VL); });
      if constexpr (PAIRS)
        multiply_pairs<N>(acc, left, left_row, left_k, right + d, dim, k);
      else
        multiply<N>(acc, left, left_row, left_k, right + d, dim, k);
      each<M, N>([&](int m, int v) { store(out + m * dim + d + v * VL, acc[m][v]); });
    });
  }
}

}  // namespace
