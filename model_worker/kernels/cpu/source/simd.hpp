// Vectors of float32 as wide as the processor has them, and how 16-bit numbers become such vectors.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace tessera {

#if defined(__AVX512F__)
constexpr int WIDTH = 16;
constexpr int ROWS_MAX = 12;  // rows of a tile: 12 x 2 sums and what they are made of fill the 32 registers
constexpr const char* ISA = "avx512";
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
constexpr int WIDTH = 8;
constexpr int ROWS_MAX = 6;  // 6 x 2 sums of the 16 registers
constexpr const char* ISA = "avx2";
#else
#error "kernels of their own need AVX2, FMA and F16C"
#endif

using Half = uint16_t;  // the bits of an IEEE binary16
struct Brain {          // those of a bfloat16
  uint16_t bits;
};
typedef float Vec __attribute__((vector_size(4 * WIDTH)));
typedef int32_t IntVec __attribute__((vector_size(4 * WIDTH)));

inline Vec load(const float* from) {
  Vec value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

inline void store(float* to, Vec value) { std::memcpy(to, &value, sizeof value); }

inline Vec load(const Half* from) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#else
  return (Vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#endif
}

inline void store(Half* to, Vec value) {
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)to, _mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
  _mm_storeu_si128((__m128i*)to, _mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT));
#endif
}

inline Vec load(const Brain* from) {
#if defined(__AVX512F__)
  return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16);
#else
  return (Vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from)), 16);
#endif
}

inline float load_one(const float* from) { return *from; }
inline float load_one(const Half* from) { return _cvtsh_ss(*from); }
inline float load_one(const Brain* from) {
  const uint32_t bits = uint32_t{from->bits} << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline void store_one(float* to, float value) { *to = value; }
inline void store_one(Half* to, float value) { *to = _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); }
inline void store_one(Brain* to, float value) {  // to the nearest, of two to the even one
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  to->bits = static_cast<uint16_t>(value == value ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : bits >> 16 | 0x40);
}

inline Vec broadcast(float value) { return value - Vec{}; }

inline Vec maximum(Vec a, Vec b) { return a > b ? a : b; }

// The lanes' sum: always halves upon halves.
inline float sum(Vec value) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)value);
#else
  __m128 half = _mm_add_ps(_mm256_castps256_ps128((__m256)value), _mm256_extractf128_ps((__m256)value, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
#endif
}

// The largest of the lanes, none of which may be a NaN.
inline float largest(Vec value) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)value);
#else
  __m128 half = _mm_max_ps(_mm256_castps256_ps128((__m256)value), _mm256_extractf128_ps((__m256)value, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
#endif
}

inline bool has_nan(Vec value) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)value, (__m512)value, _CMP_UNORD_Q) != 0;
#else
  return _mm256_movemask_ps(_mm256_cmp_ps((__m256)value, (__m256)value, _CMP_UNORD_Q)) != 0;
#endif
}

inline Vec magnitude(Vec value) { return (Vec)((IntVec)value & 0x7fffffff); }

// As many bytes as a vector has. What is interleaved, narrowed or looked up stays within its lane of 16 bytes.
typedef uint8_t Bytes __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t Pairs __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t Quads __attribute__((vector_size(4 * WIDTH)));
#if defined(__AVX512F__)
inline Bytes load_bytes(const void* from) { return (Bytes)_mm512_loadu_si512(from); }
inline void store_bytes(void* to, Bytes value) { _mm512_storeu_si512(to, (__m512i)value); }
inline Bytes in_each_lane(const uint8_t (&from)[16]) { return (Bytes)_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)from)); }
inline Bytes look_up(Bytes table, Bytes codes) { return (Bytes)_mm512_shuffle_epi8((__m512i)table, (__m512i)codes); }
inline Bytes upper_halves(Bytes value) { return (Bytes)_mm512_srli_epi16((__m512i)value, 4) & 15; }
inline Bytes interleave_lower(Bytes even, Bytes odd) { return (Bytes)_mm512_unpacklo_epi8((__m512i)even, (__m512i)odd); }
inline Bytes interleave_upper(Bytes even, Bytes odd) { return (Bytes)_mm512_unpackhi_epi8((__m512i)even, (__m512i)odd); }
inline Bytes interleave_lower_pairs(Bytes even, Bytes odd) { return (Bytes)_mm512_unpacklo_epi16((__m512i)even, (__m512i)odd); }
inline Bytes interleave_upper_pairs(Bytes even, Bytes odd) { return (Bytes)_mm512_unpackhi_epi16((__m512i)even, (__m512i)odd); }
inline Bytes narrowed(Pairs first, Pairs second) { return (Bytes)_mm512_packus_epi16((__m512i)first, (__m512i)second); }  // of numbers below 256
inline Pairs narrowed(Quads first, Quads second) { return (Pairs)_mm512_packus_epi32((__m512i)first, (__m512i)second); }
inline bool is_any(Bytes value) { return _mm512_test_epi32_mask((__m512i)value, (__m512i)value) != 0; }
#else
inline Bytes load_bytes(const void* from) { return (Bytes)_mm256_loadu_si256((const __m256i*)from); }
inline void store_bytes(void* to, Bytes value) { _mm256_storeu_si256((__m256i*)to, (__m256i)value); }
inline Bytes in_each_lane(const uint8_t (&from)[16]) { return (Bytes)_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)from)); }
inline Bytes look_up(Bytes table, Bytes codes) { return (Bytes)_mm256_shuffle_epi8((__m256i)table, (__m256i)codes); }
inline Bytes upper_halves(Bytes value) { return (Bytes)_mm256_srli_epi16((__m256i)value, 4) & 15; }
inline Bytes interleave_lower(Bytes even, Bytes odd) { return (Bytes)_mm256_unpacklo_epi8((__m256i)even, (__m256i)odd); }
inline Bytes interleave_upper(Bytes even, Bytes odd) { return (Bytes)_mm256_unpackhi_epi8((__m256i)even, (__m256i)odd); }
inline Bytes interleave_lower_pairs(Bytes even, Bytes odd) { return (Bytes)_mm256_unpacklo_epi16((__m256i)even, (__m256i)odd); }
inline Bytes interleave_upper_pairs(Bytes even, Bytes odd) { return (Bytes)_mm256_unpackhi_epi16((__m256i)even, (__m256i)odd); }
inline Bytes narrowed(Pairs first, Pairs second) { return (Bytes)_mm256_packus_epi16((__m256i)first, (__m256i)second); }
inline Pairs narrowed(Quads first, Quads second) { return (Pairs)_mm256_packus_epi32((__m256i)first, (__m256i)second); }
inline bool is_any(Bytes value) { return !_mm256_testz_si256((__m256i)value, (__m256i)value); }
#endif

// exp to about one unit in the last place: 2^n * e^r with |r| <= ln(2) / 2, e^r by Cephes' polynomial (expf.c). Of NaN it is NaN, of what is too small
// to have a normal one 0 or next to it.
inline Vec exponential(Vec x) {
#if defined(__AVX512F__)
  // Beyond these bounds it is 0 or infinite all the same; of a number and a NaN both operations give the second.
  const __m512 bounded = _mm512_min_ps(_mm512_set1_ps(89.0f), _mm512_max_ps(_mm512_set1_ps(-110.0f), (__m512)x));
  const Vec n = (Vec)_mm512_roundscale_ps((__m512)((Vec)bounded * 1.44269504f), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  const Vec bounded = x < -87.336f ? broadcast(-87.336f) : x > 88.7f ? broadcast(88.7f) : x;
  const Vec magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vec shifted = bounded * 1.44269504f + magic;
  const Vec n = shifted - magic;
#endif
  const Vec r = ((Vec)bounded - n * 0.693359375f) + n * 2.12194440e-4f;
  Vec p = broadcast(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const Vec e = (p * r) * r + r + 1.0f;
#if defined(__AVX512F__)
  return (Vec)_mm512_scalef_ps((__m512)e, (__m512)n);
#else
  const IntVec bits = ((IntVec)shifted << 23) + (IntVec)e;  // the low bits of `shifted` are n
  return x < -87.336f ? broadcast(0.0f) : x > 88.7f ? broadcast(__builtin_inff()) : x == x ? (Vec)bits : x;
#endif
}

}  // namespace tessera
