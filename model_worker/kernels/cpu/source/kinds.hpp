// Kinds of weights: how a line of one looks, in which form it takes its inputs, and how the two are multiplied.
//
// A kind has
//   ROWS                        rows of a tile at most: its sums and what they are made of fill the registers
//   LINE_BYTES, ROW_BYTES       of a line of a panel, and of a line of one row of inputs
//   put(from, line, row, rows)  LINE numbers as line of row `row` of a tile of `rows`; `line` is where the tile's line begins
//   add<R>(x, panel, lines, sums, ahead)  adds the products of R rows with a panel; each row's sum goes in the order of its inputs, whatever R is
//   pack(from, to)              a line from [LINE, PANEL] numbers; false: they cannot be kept like this
//   unpack(line, column, count, to)  the first `count` of one of its columns
//   Plain, Source               the kind itself, and what tells `add` where a panel's lines are: here `panel` is their address
// and those that keep numbers of type Number as they are, one behind the other
//   SOME, add_some<R>(line of x, weights, k, sums)  the products of SOME inputs from `k` on with their weights [SOME, PANEL], as `add` does all
#pragma once

#include <algorithm>
#include <cmath>

#include "weight.hpp"

namespace tessera {

// What will be read next is asked for little by little, in one of two ways. Both are told of each line before it is multiplied, `panel` being what it is a
// line of, and of each step of the line, which reads BYTES of it.

// Where all is read once: the line that comes DISTANCE later, in the end those of the panel `next`. It comes past the caches, from which it would push what
// this and other processes need again.
class Onward {
 public:
  Onward(const std::byte* next, int lines) : next_(next), lines_(lines) {}

  template <std::size_t LINE_BYTES>
  void line(const std::byte* panel, int line) {
    const int later = line + static_cast<int>(DISTANCE / LINE_BYTES);
    at_ = later < lines_ ? panel + later * LINE_BYTES : next_ + (later - lines_) * LINE_BYTES;
  }
  template <std::size_t BYTES>
  void step() {
    for (std::size_t at = 0; at < BYTES; at += CACHE_LINE) _mm_prefetch(reinterpret_cast<const char*>(at_ + at), _MM_HINT_NTA);
    at_ += BYTES;
  }

 private:
  static constexpr std::size_t DISTANCE = 8 << 10;

  const std::byte *next_, *at_ = nullptr;
  int lines_;
};

// Something else: `per_line` cache lines of it beside each line, past the second-level cache or into it.
template <bool IS_PAST>
class Apart {
 public:
  Apart(const std::byte* from, int per_line) : at_(from), per_line_(per_line) {}

  template <std::size_t>
  void line(const std::byte*, int) {
    for (int each = 0; each < per_line_; ++each, at_ += CACHE_LINE) {
      const char* at = reinterpret_cast<const char*>(at_);
      if constexpr (IS_PAST) _mm_prefetch(at, _MM_HINT_NTA);
      else _mm_prefetch(at, _MM_HINT_T1);
    }
  }
  template <std::size_t>
  void step() {}

 private:
  const std::byte* at_;
  int per_line_;
};

// Of what is at hand.
struct Nothing {
  template <std::size_t>
  void line(const std::byte*, int) {}
  template <std::size_t>
  void step() {}
};

// Weights of type W by inputs in float32. A line of a panel is [LINE, PANEL].
template <typename W>
struct ByFloats {
  using Plain = ByFloats;
  using Number = W;
  static constexpr int SOME = 1;
  using Source = const std::byte*;
  static constexpr int ROWS = ROWS_MAX;
  static constexpr std::size_t LINE_BYTES = sizeof(W) * LINE * PANEL, ROW_BYTES = sizeof(float) * LINE;

  static void put(const float* from, std::byte* line, int row, int) { std::memcpy(line + row * ROW_BYTES, from, ROW_BYTES); }

  template <int R, typename Ahead>
  static void add(const std::byte* x, const std::byte* panel, int lines, Vec (&sums)[R][2], Ahead ahead) {
    const std::byte* weights = panel;
    for (int line = 0; line < lines; ++line, x += R * ROW_BYTES) {
      ahead.template line<LINE_BYTES>(panel, line);
      for (int k = 0; k < LINE; ++k, weights += sizeof(W) * PANEL) {
        ahead.template step<sizeof(W) * PANEL>();
        add_some<R>(x, weights, k, sums);
      }
    }
  }

  template <int R>
  static void add_some(const std::byte* x, const std::byte* weights, int k, Vec (&sums)[R][2]) {
    const float* inputs = reinterpret_cast<const float*>(x);
    const W* numbers = reinterpret_cast<const W*>(weights);
    const Vec first = load(numbers), second = load(numbers + WIDTH);
#pragma GCC unroll 12
    for (int row = 0; row < R; ++row) {
      const Vec value = broadcast(inputs[row * LINE + k]);
      sums[row][0] += value * first;
      sums[row][1] += value * second;
    }
  }

  static bool pack(const float* from, std::byte* to) {
    for (int at = 0; at < LINE * PANEL; ++at) store_one(reinterpret_cast<W*>(to) + at, from[at]);
    return true;
  }

  static void unpack(const std::byte* line, int column, int count, float* to) {
    for (int k = 0; k < count; ++k) to[k] = load_one(reinterpret_cast<const W*>(line) + k * PANEL + column);
  }
};

#if defined(__AVX512BF16__)

// Both in bfloat16, two products at a time. A line of a panel is [LINE / 2, PANEL, 2].
struct BrainsByBrains {
  using Plain = BrainsByBrains;
  using Number = Brain;
  static constexpr int SOME = 2;
  using Source = const std::byte*;
  static constexpr int ROWS = ROWS_MAX;
  static constexpr std::size_t LINE_BYTES = sizeof(Brain) * LINE * PANEL, ROW_BYTES = sizeof(Brain) * LINE;

  static void put(const float* from, std::byte* line, int row, int) {
    const __m512bh brains = _mm512_cvtne2ps_pbh((__m512)load(from + WIDTH), (__m512)load(from));
    std::memcpy(line + row * ROW_BYTES, &brains, ROW_BYTES);
  }

  template <int R, typename Ahead>
  static void add(const std::byte* x, const std::byte* panel, int lines, Vec (&sums)[R][2], Ahead ahead) {
    const std::byte* weights = panel;
    for (int line = 0; line < lines; ++line, x += R * ROW_BYTES) {
      ahead.template line<LINE_BYTES>(panel, line);
      for (int k = 0; k < LINE; k += 2, weights += 4 * PANEL) {
        ahead.template step<4 * PANEL>();
        add_some<R>(x, weights, k, sums);
      }
    }
  }

  template <int R>
  static void add_some(const std::byte* x, const std::byte* weights, int k, Vec (&sums)[R][2]) {
    const __m512bh first = (__m512bh)_mm512_loadu_si512(weights), second = (__m512bh)_mm512_loadu_si512(weights + 64);
#pragma GCC unroll 12
    for (int row = 0; row < R; ++row) {
      int32_t both;
      std::memcpy(&both, x + row * ROW_BYTES + k * 2, 4);
      const __m512bh value = (__m512bh)_mm512_set1_epi32(both);
      sums[row][0] = (Vec)_mm512_dpbf16_ps((__m512)sums[row][0], first, value);
      sums[row][1] = (Vec)_mm512_dpbf16_ps((__m512)sums[row][1], second, value);
    }
  }

  static bool pack(const float* from, std::byte* to) {
    for (int k = 0; k < LINE; ++k)
      for (int column = 0; column < PANEL; ++column) store_one(brain(to, k, column), from[k * PANEL + column]);
    return true;
  }

  static void unpack(const std::byte* line, int column, int count, float* to) {
    for (int k = 0; k < count; ++k) to[k] = load_one(brain(const_cast<std::byte*>(line), k, column));
  }

 private:
  static Brain* brain(std::byte* line, int k, int column) { return reinterpret_cast<Brain*>(line) + (k / 2 * PANEL + column) * 2 + k % 2; }
};

#endif

// Both in 8 bits, each line with a scale of its own, summed in integers within a line. A number stands for itself times its scale: -127 to 127
// times the line's largest magnitude over 127. A line of a panel is [LINE / 4, PANEL, 4] of a number plus 128, and PANEL scales in binary16; a line of a
// tile's inputs is [rows, LINE], [rows] scales in float32, and 128 times [rows] sums of the numbers.
struct BytesByBytes {
  using Plain = BytesByBytes;
  using Source = const std::byte*;
  static constexpr int ROWS = 6;  // whole sums and sums so far, two vectors each
  static constexpr std::size_t VALUES_BYTES = LINE * PANEL, LINE_BYTES = VALUES_BYTES + sizeof(Half) * PANEL;
  static constexpr std::size_t ROW_BYTES = LINE + sizeof(float) + sizeof(int32_t);

  static void put(const float* from, std::byte* line, int row, int rows) {
    int8_t* values = reinterpret_cast<int8_t*>(line) + row * LINE;
    const float most = largest_of(from);
    float* scale = reinterpret_cast<float*>(line + rows * LINE) + row;
    int32_t* sum = reinterpret_cast<int32_t*>(line + rows * (LINE + sizeof(float))) + row;
    const float inverse = 127.0f / most;
    // Infinity and what is no number become the scale, so that they reach every product. Next to nothing is nothing.
    *scale = std::isfinite(most) ? std::isfinite(inverse) ? most / 127.0f : 0.0f : most;
    *sum = 128 * quantize(from, std::isfinite(most) && std::isfinite(inverse) ? inverse : 0.0f, values);
  }

  template <int R, typename Ahead>
  static void add(const std::byte* x, const std::byte* panel, int lines, Vec (&totals)[R][2], Ahead ahead) {
    const std::byte* weights = panel;
    for (int line = 0; line < lines; ++line, x += R * ROW_BYTES, weights += LINE_BYTES) {
      ahead.template line<LINE_BYTES>(panel, line);
      const float* scales = reinterpret_cast<const float*>(x + R * LINE);
      const int32_t* offsets = reinterpret_cast<const int32_t*>(x + R * (LINE + sizeof(float)));
      Sum sums[R][SUMS];
      for (int row = 0; row < R; ++row)
        for (int at = 0; at < SUMS; ++at) sums[row][at] = start(offsets[row]);
#pragma GCC unroll 8
      for (int quad = 0; quad < LINE / 4; ++quad) {
        ahead.template step<4 * PANEL>();
#pragma GCC unroll 6
        for (int row = 0; row < R; ++row) {
          int32_t values;
          std::memcpy(&values, x + row * LINE + quad * 4, 4);
          for (int at = 0; at < SUMS; ++at)
            sums[row][at] = multiply_and_add(sums[row][at], weights + quad * 4 * PANEL + at * 4 * SUM_WIDTH, values);
        }
      }
      ahead.template step<sizeof(Half) * PANEL>();
      const Half* weight_scales = reinterpret_cast<const Half*>(weights + VALUES_BYTES);
      const Vec first = load(weight_scales), second = load(weight_scales + WIDTH);
      for (int row = 0; row < R; ++row) {
        totals[row][0] += as_floats(sums[row]) * (first * scales[row]);
        totals[row][1] += as_floats(sums[row] + SUMS / 2) * (second * scales[row]);
      }
    }
  }

  static bool pack(const float* from, std::byte* to) {
    Half* scales = reinterpret_cast<Half*>(to + VALUES_BYTES);
    for (int column = 0; column < PANEL; ++column) {
      float numbers[LINE];
      for (int k = 0; k < LINE; ++k) numbers[k] = from[k * PANEL + column];
      const float most = largest_of(numbers);
      store_one(scales + column, most / 127.0f);
      const float inverse = 1.0f / load_one(scales + column);  // of the scale as it is kept
      int8_t values[LINE];
      quantize(numbers, std::isfinite(inverse) ? inverse : 0.0f, values);
      for (int k = 0; k < LINE; ++k) to[(k / 4 * PANEL + column) * 4 + k % 4] = static_cast<std::byte>(values[k] + 128);
    }
    return true;
  }

  static void unpack(const std::byte* line, int column, int count, float* to) {
    const float scale = load_one(reinterpret_cast<const Half*>(line + VALUES_BYTES) + column);
    for (int k = 0; k < count; ++k) to[k] = static_cast<float>(static_cast<int>(line[(k / 4 * PANEL + column) * 4 + k % 4]) - 128) * scale;
  }

 private:
  // Of LINE magnitudes; a NaN if one is.
  static float largest_of(const float* from) {
    Vec most{};
    bool is_nan = false;
    for (int at = 0; at < LINE; at += WIDTH) {
      const Vec value = load(from + at);
      is_nan |= has_nan(value);
      most = maximum(magnitude(value), most);
    }
    return is_nan ? __builtin_nanf("") : largest(most);
  }

  // The nearest of -127 to 127 of LINE numbers times `inverse`, 0 if that is 0; returns their sum.
  static int32_t quantize(const float* from, float inverse, int8_t* to) {
    if (inverse == 0.0f) {
      std::fill(to, to + LINE, 0);
      return 0;
    }
#if defined(__AVX512F__)
    const __m512i most = _mm512_set1_epi32(127), least = _mm512_set1_epi32(-127);
    __m512i total = _mm512_setzero_si512();
    for (int at = 0; at < LINE; at += WIDTH) {
      const __m512i values = _mm512_max_epi32(least, _mm512_min_epi32(most, _mm512_cvtps_epi32((__m512)(load(from + at) * inverse))));
      _mm_storeu_si128((__m128i*)(to + at), _mm512_cvtepi32_epi8(values));
      total = _mm512_add_epi32(total, values);
    }
    return _mm512_reduce_add_epi32(total);
#else
    int32_t total = 0;
    for (int at = 0; at < LINE; ++at) {
      const int value = std::clamp(_mm_cvtss_si32(_mm_set_ss(from[at] * inverse)), -127, 127);
      to[at] = static_cast<int8_t>(value);
      total += value;
    }
    return total;
#endif
  }

#if defined(__AVX512VNNI__)

  using Sum = __m512i;
  static constexpr int SUM_WIDTH = 16;
  static Sum start(int32_t offset) { return _mm512_set1_epi32(-offset); }
  static Sum multiply_and_add(Sum sum, const std::byte* weights, int32_t values) {
    return _mm512_dpbusd_epi32(sum, _mm512_loadu_si512(weights), _mm512_set1_epi32(values));
  }
  static Vec as_floats(const Sum* sums) { return (Vec)_mm512_cvtepi32_ps(sums[0]); }

#else

  using Sum = __m256i;
  static constexpr int SUM_WIDTH = 8;
  static Sum start(int32_t) { return _mm256_setzero_si256(); }
  // Two products of unsigned by signed bytes have to fit 16 bits: |x| * (the sign of x on w), both at most 127, do.
  static Sum multiply_and_add(Sum sum, const std::byte* weights, int32_t values) {
    const __m256i w = _mm256_xor_si256(_mm256_loadu_si256((const __m256i*)weights), _mm256_set1_epi8(-128));
    const __m256i x = _mm256_set1_epi32(values);
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(x), _mm256_sign_epi8(w, x));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
  static Vec as_floats(const Sum* sums) {
#if defined(__AVX512F__)
    return (Vec)_mm512_cvtepi32_ps(_mm512_inserti64x4(_mm512_castsi256_si512(sums[0]), sums[1], 1));
#else
    return (Vec)_mm256_cvtepi32_ps(sums[0]);
#endif
  }

#endif

  static constexpr int SUMS = PANEL / SUM_WIDTH;  // of a row
};

}  // namespace tessera
