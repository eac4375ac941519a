// Numbers of a cache, and how they are multiplied: so many of them at once by as many others, into one sum.
#pragma once

#include <cstddef>

#include "simd.hpp"

namespace tessera {

// AT_ONCE numbers that are multiplied into one sum lie side by side: of a block and head keys [head_dim / AT_ONCE, block_size, AT_ONCE], values
// [block_size / AT_ONCE, head_dim, AT_ONCE]. AT_ONCE others make a Factor.
template <typename K>
struct Cached {
  static constexpr int AT_ONCE = 1;
  using Factor = float;
  using Numbers = Vec;  // for each lane AT_ONCE of them

  // `head_dim` numbers as factors, `stride` apart.
  static void put_factors(const float* from, int head_dim, Factor* to, int stride) {
    for (int d = 0; d < head_dim; ++d) to[d * stride] = from[d];
  }
  static Numbers read(const K* from) { return load(from); }
  // Values of so many positions or more: what lies behind the last may be no number.
  static Numbers read_values(const K* from, int) { return load(from); }
  static void add(Vec& sum, Factor factor, Numbers numbers) { sum += broadcast(factor) * numbers; }

  // Values of one position, [head_dim].
  static void put_values(K* to, const float* from, int head_dim) {
    int d = 0;
    for (; d + WIDTH <= head_dim; d += WIDTH) store(to + d, load(from + d));
    for (; d < head_dim; ++d) store_one(to + d, from[d]);
  }

  // Weights take the place of the scores that they were made of.
  static void put_weights(float* weights, int at, Vec values) { store(weights + at, values); }
  static Factor weight(const float* weights, int index) { return weights[index]; }
  static float one_weight(const float* weights, int at) { return weights[at]; }
};

#if defined(__AVX512BF16__)

inline void store(Brain* to, Vec value) {
  const __m256bh brains = _mm512_cvtneps_pbh((__m512)value);
  std::memcpy(to, &brains, sizeof brains);
}

template <>
struct Cached<Brain> {
  static constexpr int AT_ONCE = 2;
  using Factor = int32_t;  // the bits of two
  using Numbers = __m512bh;

  static void put_factors(const float* from, int head_dim, Factor* to, int stride) {
    Brain brains[WIDTH];
    int d = 0;
    for (; d + WIDTH <= head_dim; d += WIDTH) {
      store(brains, load(from + d));
      for (int at = 0; at < WIDTH; at += AT_ONCE, to += stride) *to = weight_of(brains + at);
    }
    for (; d < head_dim; d += AT_ONCE, to += stride) {
      store_one(brains, from[d]);
      store_one(brains + 1, from[d + 1]);
      *to = weight_of(brains);
    }
  }
  static Numbers read(const Brain* from) { return (__m512bh)_mm512_loadu_si512(from); }
  static Numbers read_values(const Brain* from, int positions) {
    return positions >= AT_ONCE ? read(from) : (__m512bh)_mm512_and_si512(_mm512_loadu_si512(from), _mm512_set1_epi32(0xffff));
  }
  static void add(Vec& sum, Factor factor, Numbers numbers) {
    sum = (Vec)_mm512_dpbf16_ps((__m512)sum, numbers, (__m512bh)_mm512_set1_epi32(factor));
  }

  static void put_values(Brain* to, const float* from, int head_dim) {
    int d = 0;
    for (; d + WIDTH <= head_dim; d += WIDTH) {
      const __m256i brains = (__m256i)_mm512_cvtneps_pbh((__m512)load(from + d));
      _mm512_mask_storeu_epi16(to + d * AT_ONCE, 0x55555555, _mm512_cvtepu16_epi32(brains));
    }
    for (; d < head_dim; ++d) store_one(to + d * AT_ONCE, from[d]);
  }

  static void put_weights(float* weights, int at, Vec values) { store(reinterpret_cast<Brain*>(weights) + at, values); }
  static Factor weight(const float* weights, int index) { return weight_of(reinterpret_cast<const Brain*>(weights) + AT_ONCE * index); }
  static float one_weight(const float* weights, int at) {
    Brain weight;
    std::memcpy(&weight, reinterpret_cast<const Brain*>(weights) + at, sizeof weight);
    return load_one(&weight);
  }

 private:
  static Factor weight_of(const Brain* both) {
    Factor bits;
    std::memcpy(&bits, both, sizeof bits);
    return bits;
  }
};

#endif

// How far behind the numbers of its block and head a position's first key lies, and its first value.
template <typename K>
std::ptrdiff_t key_at(int offset) {
  return offset * Cached<K>::AT_ONCE;
}

template <typename K>
std::ptrdiff_t value_at(int offset, int head_dim) {
  constexpr int AT_ONCE = Cached<K>::AT_ONCE;
  return std::ptrdiff_t{offset / AT_ONCE} * AT_ONCE * head_dim + offset % AT_ONCE;
}

}  // namespace tessera
