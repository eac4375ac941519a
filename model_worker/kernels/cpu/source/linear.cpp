#include "linear.hpp"

#include <algorithm>
#include <utility>
#include <vector>

#include "tiles.hpp"

namespace tessera {

namespace {

// `rows` tiles' worth of x, transposed so that the values that meet the same weight lie side by side: [in, R].
template <int R>
void transpose(const float* x, std::ptrdiff_t x_stride, int in, float* to) {
  for (int k = 0; k < in; ++k)
    for (int row = 0; row < R; ++row) to[k * R + row] = x[row * x_stride + k];
}

// R rows by one panel. `x` is [in, R].
template <typename W, int R>
void tile(const float* x, const W* panel, const float* bias, float* y, std::ptrdiff_t y_stride, int in, int columns) {
  Vec sums[R][2] = {};
  for (int k = 0; k < in; ++k) {
    const Vec first = load(panel + k * PANEL), second = load(panel + k * PANEL + WIDTH);
#pragma GCC unroll 12
    for (int row = 0; row < R; ++row) {
      const Vec value = broadcast(x[k * R + row]);
      sums[row][0] += value * first;
      sums[row][1] += value * second;
    }
  }
  for (int row = 0; row < R; ++row) {
    float* target = y + row * y_stride;
    if (columns == PANEL) {
      for (int half = 0; half < 2; ++half) {
        Vec result = sums[row][half];
        if (bias) result += load(bias + half * WIDTH);
        store(target + half * WIDTH, result);
      }
      continue;
    }
    float values[PANEL];
    store(values, sums[row][0]);
    store(values + WIDTH, sums[row][1]);
    for (int column = 0; column < columns; ++column) {
      target[column] = values[column] + (bias ? bias[column] : 0.0f);
    }
  }
}

template <typename W>
using Tile = void (*)(const float*, const W*, const float*, float*, std::ptrdiff_t, int, int);
using Transpose = void (*)(const float*, std::ptrdiff_t, int, float*);

template <typename W, int... R>
constexpr Tile<W> pick_tile(int rows, std::integer_sequence<int, R...>) {
  constexpr Tile<W> tiles[] = {tile<W, R + 1>...};
  return tiles[rows - 1];
}

template <int... R>
constexpr Transpose pick_transpose(int rows, std::integer_sequence<int, R...>) {
  constexpr Transpose all[] = {transpose<R + 1>...};
  return all[rows - 1];
}

using Sizes = std::make_integer_sequence<int, ROWS_MAX>;

}  // namespace

template <typename W>
void pack(Team& team, const float* from, std::ptrdiff_t out_stride, std::ptrdiff_t in_stride, int out, int in, W* to) {
  team.run(panels_of(out), [&](int panel) {
    W* target = to + std::ptrdiff_t{panel} * in * PANEL;
    for (int k = 0; k < in; ++k)
      for (int column = 0; column < PANEL; ++column) {
        const int row = panel * PANEL + column;
        store_one(target + k * PANEL + column, row < out ? from[row * out_stride + k * in_stride] : 0.0f);
      }
  });
}

template <typename W>
void multiply(Team& team, const float* x, std::ptrdiff_t x_stride, const W* weight, const float* bias, float* y, std::ptrdiff_t y_stride, int rows,
              int in, int out) {
  const Tiles tiles(rows, ROWS_MAX);
  const float* turned = x;
  static thread_local std::vector<float> memory;
  if (rows > 1) {
    memory.resize(std::max(memory.size(), std::size_t(rows) * in));
    float* to = memory.data();
    turned = to;
    const auto turn = [&](int tile) {
      const int first = tiles.first(tile);
      pick_transpose(tiles.size(tile), Sizes{})(x + first * x_stride, x_stride, in, to + std::ptrdiff_t{first} * in);
    };
    if (tiles.count < 4)
      for (int tile = 0; tile < tiles.count; ++tile) turn(tile);
    else
      team.run(tiles.count, turn);
  }
  const Stripes stripes(tiles, in * static_cast<int>(sizeof(float)), panels_of(out), team.size());
  team.run(stripes.count(), [&](int piece) {
    for (int panel = stripes.first_panel(piece); panel < stripes.last_panel(piece); ++panel) {
      const int column = panel * PANEL;
      for (int each = stripes.first_tile(piece); each < stripes.last_tile(piece); ++each) {
        const int first = tiles.first(each);
        pick_tile<W>(tiles.size(each), Sizes{})(turned + std::ptrdiff_t{first} * in, weight + std::ptrdiff_t{panel} * in * PANEL,
                                                bias ? bias + column : nullptr, y + first * y_stride + column, y_stride, in,
                                                std::min(PANEL, out - column));
      }
    }
  });
}

template <typename W>
void gather(Team& team, const W* weight, int in, const int64_t* ids, int count, float* to) {
  team.run(count, [&](int at) {
    const W* panel = weight + ids[at] / PANEL * in * PANEL + ids[at] % PANEL;
    for (int k = 0; k < in; ++k) to[std::ptrdiff_t{at} * in + k] = load_one(panel + k * PANEL);
  });
}

#define TESSERA_LINEAR(W)                                                                                                              \
  template void pack<W>(Team&, const float*, std::ptrdiff_t, std::ptrdiff_t, int, int, W*);                                              \
  template void multiply<W>(Team&, const float*, std::ptrdiff_t, const W*, const float*, float*, std::ptrdiff_t, int, int, int); \
  template void gather<W>(Team&, const W*, int, const int64_t*, int, float*);
TESSERA_LINEAR(float)
TESSERA_LINEAR(Half)

}  // namespace tessera
