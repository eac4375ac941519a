#include "eight_bits.hpp"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "tiles.hpp"

namespace tessera {

namespace {

constexpr int QUADS = GROUP / 4;
constexpr int ROWS = 6;  // of a tile: whole sums and sums so far, two vectors each

// One group of numbers, `stride` apart, the missing ones zero. Returns the scale; `to` gets -127 to 127. Infinity and what is no number become the scale, so that they reach every product.
float quantize(const float* from, std::ptrdiff_t stride, int count, int8_t* to) {
  float most = 0.0f;
  for (int at = 0; at < count; ++at) {
    const float size = std::fabs(from[at * stride]);
    most = size > most || size != size ? size : most;
  }
  std::fill(to, to + GROUP, 0);
  if (!std::isfinite(most)) return most;
  const float inverse = 127.0f / most;
  if (!std::isfinite(inverse)) return 0.0f;  // nothing, or next to nothing
  for (int at = 0; at < count; ++at) to[at] = static_cast<int8_t>(std::nearbyint(from[at * stride] * inverse));
  return most / 127.0f;
}

// R rows of inputs as a tile takes them: of each group [QUADS, R] quads, the rows' scales, and 128 times the sums of their numbers.
struct Quantized {
  Quantized(int rows, int groups) : quads(std::size_t(rows) * groups * QUADS), scales(std::size_t(rows) * groups), sums(scales.size()) {}
  std::vector<int32_t> quads;
  std::vector<float> scales;
  std::vector<int32_t> sums;
};

void quantize_row(const float* x, int in, int row, int rows, int first, Quantized& to) {
  const int groups = groups_of(in);
  for (int group = 0; group < groups; ++group) {
    int8_t values[GROUP];
    const int count = std::min(GROUP, in - group * GROUP);
    const std::size_t base = std::size_t(first) * groups + std::size_t(group) * rows;
    to.scales[base + row] = quantize(x + group * GROUP, 1, count, values);
    int32_t sum = 0;
    for (int at = 0; at < GROUP; ++at) sum += values[at];
    to.sums[base + row] = 128 * sum;
    for (int quad = 0; quad < QUADS; ++quad) {
      int32_t bits;
      std::memcpy(&bits, values + 4 * quad, 4);
      to.quads[(base * QUADS) + std::size_t(quad) * rows + row] = bits;
    }
  }
}

#if defined(__AVX512VNNI__)

using Sum = __m512i;
constexpr int SUM_WIDTH = 16;
inline Sum start(int32_t offset) { return _mm512_set1_epi32(-offset); }
inline Sum add(Sum sum, const uint8_t* weights, int32_t quad) {
  return _mm512_dpbusd_epi32(sum, _mm512_loadu_si512(weights), _mm512_set1_epi32(quad));
}
inline Vec as_floats(const Sum* sums) { return (Vec)_mm512_cvtepi32_ps(sums[0]); }

#else

using Sum = __m256i;
constexpr int SUM_WIDTH = 8;
inline Sum start(int32_t) { return _mm256_setzero_si256(); }
// Two products of unsigned by signed bytes have to fit 16 bits: |x| * (the sign of x on w), both at most 127, do.
inline Sum add(Sum sum, const uint8_t* weights, int32_t quad) {
  const __m256i w = _mm256_xor_si256(_mm256_loadu_si256((const __m256i*)weights), _mm256_set1_epi8(-128));
  const __m256i x = _mm256_set1_epi32(quad);
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(x), _mm256_sign_epi8(w, x));
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
inline Vec as_floats(const Sum* sums) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtepi32_ps(_mm512_inserti64x4(_mm512_castsi256_si512(sums[0]), sums[1], 1));
#else
  return (Vec)_mm256_cvtepi32_ps(sums[0]);
#endif
}

#endif

constexpr int SUMS = PANEL / SUM_WIDTH;         // of a row
constexpr int SUMS_OF_VEC = WIDTH / SUM_WIDTH;  // that make a vector of floats

template <int R>
void tile(const Quantized& x, std::size_t first, const uint8_t* values, const float* scales, int groups, const float* bias, float* y,
          std::ptrdiff_t y_stride, int columns) {
  Vec totals[R][2] = {};
  for (int group = 0; group < groups; ++group) {
    const std::size_t base = first * groups + std::size_t(group) * R;
    const int32_t* quads = x.quads.data() + base * QUADS;
    Sum sums[R][SUMS];
    for (int row = 0; row < R; ++row)
      for (int at = 0; at < SUMS; ++at) sums[row][at] = start(x.sums[base + row]);
    const uint8_t* weights = values + std::ptrdiff_t{group} * GROUP * PANEL;
#pragma GCC unroll 8
    for (int quad = 0; quad < QUADS; ++quad)
#pragma GCC unroll 6
      for (int row = 0; row < R; ++row)
        for (int at = 0; at < SUMS; ++at)
          sums[row][at] = add(sums[row][at], weights + quad * 4 * PANEL + at * 4 * SUM_WIDTH, quads[quad * R + row]);
    for (int row = 0; row < R; ++row)
      for (int half = 0; half < 2; ++half) {
        const Vec scale = load(scales + group * PANEL + half * WIDTH) * x.scales[base + row];
        totals[row][half] += as_floats(sums[row] + half * SUMS_OF_VEC) * scale;
      }
  }
  for (int row = 0; row < R; ++row) {
    float results[PANEL];
    store(results, totals[row][0]);
    store(results + WIDTH, totals[row][1]);
    for (int column = 0; column < columns; ++column) y[row * y_stride + column] = results[column] + (bias ? bias[column] : 0.0f);
  }
}

using Tile = void (*)(const Quantized&, std::size_t, const uint8_t*, const float*, int, const float*, float*, std::ptrdiff_t, int);

template <int... R>
constexpr Tile pick(int rows, std::integer_sequence<int, R...>) {
  constexpr Tile tiles[] = {tile<R + 1>...};
  return tiles[rows - 1];
}

}  // namespace

void pack(Team& team, const float* from, std::ptrdiff_t out_stride, std::ptrdiff_t in_stride, const EightBits& to) {
  const int groups = groups_of(to.in);
  team.run(panels_of(to.out), [&](int panel) {
    for (int group = 0; group < groups; ++group) {
      const std::ptrdiff_t where = std::ptrdiff_t{panel} * groups + group;
      uint8_t* values = to.values + where * GROUP * PANEL;
      for (int column = 0; column < PANEL; ++column) {
        const int row = panel * PANEL + column, count = row < to.out ? std::min(GROUP, to.in - group * GROUP) : 0;
        int8_t numbers[GROUP];
        const float* first = from + row * out_stride + std::ptrdiff_t{group} * GROUP * in_stride;
        to.scales[where * PANEL + column] = quantize(first, in_stride, count, numbers);
        for (int at = 0; at < GROUP; ++at)
          values[at / 4 * 4 * PANEL + column * 4 + at % 4] = static_cast<uint8_t>(numbers[at] + 128);
      }
    }
  });
}

void multiply(Team& team, const float* x, std::ptrdiff_t x_stride, const EightBits& weight, const float* bias, float* y, std::ptrdiff_t y_stride,
              int rows) {
  const int in = weight.in, out = weight.out, groups = groups_of(in), panels = panels_of(out);
  const Tiles tiles(rows, ROWS);
  Quantized quantized(rows, groups);
  const auto turn = [&](int each) {
    for (int row = 0; row < tiles.size(each); ++row)
      quantize_row(x + (tiles.first(each) + row) * x_stride, in, row, tiles.size(each), tiles.first(each), quantized);
  };
  if (tiles.count < 2)
    for (int each = 0; each < tiles.count; ++each) turn(each);
  else
    team.run(tiles.count, turn);
  const Stripes stripes(tiles, in * 5 / 4, panels, team.size());
  team.run(stripes.count(), [&](int piece) {
    for (int panel = stripes.first_panel(piece); panel < stripes.last_panel(piece); ++panel) {
      const std::ptrdiff_t where = std::ptrdiff_t{panel} * groups;
      const int column = panel * PANEL;
      for (int each = stripes.first_tile(piece); each < stripes.last_tile(piece); ++each) {
        const int first = tiles.first(each);
        pick(tiles.size(each), std::make_integer_sequence<int, ROWS>{})(
            quantized, first, weight.values + where * GROUP * PANEL, weight.scales + where * PANEL, groups, bias ? bias + column : nullptr,
            y + first * y_stride + column, y_stride, std::min(PANEL, out - column));
      }
    }
  });
}

void gather(Team& team, const EightBits& weight, const int64_t* ids, int count, float* to) {
  const int groups = groups_of(weight.in);
  team.run(count, [&](int at) {
    const std::ptrdiff_t first = ids[at] / PANEL * groups;
    const int column = static_cast<int>(ids[at] % PANEL);
    for (int k = 0; k < weight.in; ++k) {
      const std::ptrdiff_t where = first + k / GROUP;
      const int within = k % GROUP;
      const int value = weight.values[where * GROUP * PANEL + within / 4 * 4 * PANEL + column * 4 + within % 4] - 128;
      to[std::ptrdiff_t{at} * weight.in + k] = static_cast<float>(value) * weight.scales[where * PANEL + column];
    }
  });
}

}  // namespace tessera
