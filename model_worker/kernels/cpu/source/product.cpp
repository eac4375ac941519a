#include "product.hpp"

#include <sys/mman.h>

#include <utility>

namespace tessera {

namespace {

constexpr int AHEAD_TILES = 16;

// Where the sums of a tile go: its first row and column of y.
struct Target {
  float* y;
  std::ptrdiff_t stride;
  const float* bias;
  int columns;  // fewer than PANEL in the last panel
  Into into;
};

void finish(const Vec (&sums)[2], const Target& target, float* y) {
  if (target.columns == PANEL) {
    for (int half = 0; half < 2; ++half) {
      Vec result = sums[half];
      if (target.bias) result += load(target.bias + half * WIDTH);
      if (target.into == Into::SUM) result += load(y + half * WIDTH);
      store(y + half * WIDTH, result);
    }
    return;
  }
  float values[PANEL];
  store(values, sums[0]);
  store(values + WIDTH, sums[1]);
  for (int column = 0; column < target.columns; ++column) {
    const float result = target.bias ? values[column] + target.bias[column] : values[column];
    y[column] = target.into == Into::SUM ? result + y[column] : result;
  }
}

template <typename K, int R>
void tile(const std::byte* x, const std::byte* panel, int lines, Ahead ahead, const Target& target) {
  Vec sums[R][2] = {};
  K::template add<R>(x, panel, lines, sums, ahead);
  for (int row = 0; row < R; ++row) finish(sums[row], target, target.y + row * target.stride);
}

using Tile = void (*)(const std::byte*, const std::byte*, int, Ahead, const Target&);

template <typename K, int... R>
Tile pick(int rows, std::integer_sequence<int, R...>) {
  static constexpr Tile tiles[] = {tile<K, R + 1>...};
  return tiles[rows - 1];
}

}  // namespace

std::size_t bytes_of(Kind kind, int out, int in) {
  return with_kind(kind, [&]<typename K>(K) { return std::size_t(panels_of(out)) * lines_of(in) * K::LINE_BYTES; });
}

// Asks the system for huge pages, so that reading it all costs fewer walks through page tables, and prefetching does not end every 4 KiB.
void use_huge_pages(std::byte* data, std::size_t size) {
  constexpr std::uintptr_t PAGE = 4096;
  const auto first = (reinterpret_cast<std::uintptr_t>(data) + PAGE - 1) / PAGE * PAGE, end = reinterpret_cast<std::uintptr_t>(data) + size;
  if (first < end) madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
}

void pack(Team& team, const float* from, std::ptrdiff_t out_stride, std::ptrdiff_t in_stride, const Weight& to) {
  use_huge_pages(to.data, bytes_of(to.kind, to.out, to.in));
  with_kind(to.kind, [&]<typename K>(K) {
    const int lines = lines_of(to.in);
    team.run(panels_of(to.out), [&](int panel) {
      std::byte* target = to.data + std::ptrdiff_t{panel} * lines * K::LINE_BYTES;
      const int columns = std::min(PANEL, to.out - panel * PANEL);
      for (int line = 0; line < lines; ++line, target += K::LINE_BYTES) {
        float numbers[LINE * PANEL] = {};
        const float* first = from + panel * PANEL * out_stride + line * LINE * in_stride;
        for (int column = 0; column < columns; ++column)
          for (int k = 0; k < std::min(LINE, to.in - line * LINE); ++k)
            numbers[k * PANEL + column] = first[column * out_stride + k * in_stride];
        K::pack(numbers, target);
      }
    });
  });
}

void multiply(Team& team, const Inputs& x, const Weight& weight, float* y, std::ptrdiff_t y_stride, Into into) {
  with_kind(weight.kind, [&]<typename K>(K) {
    const int lines = lines_of(weight.in);
    const std::size_t panel_bytes = lines * K::LINE_BYTES;
    const Tiles& tiles = x.tiles();
    const Stripes stripes(tiles, static_cast<int>(x.row_bytes()), panels_of(weight.out), team.size());
    team.run(stripes.count(), [&](int piece) {
      const int first_tile = stripes.first_tile(piece), count = stripes.last_tile(piece) - first_tile, last_panel = stripes.last_panel(piece);
      // While the tiles of one panel are multiplied, the next panel comes from memory, a part of it beside each. One tile alone reads as fast as memory
      // gives, and among many the first one's waiting does not count.
      const int following = std::min(piece + team.size(), stripes.count() - 1);
      const int per_line = count > 1 && count <= AHEAD_TILES ? (static_cast<int>(K::LINE_BYTES) / Ahead::CACHE_LINE + count - 1) / count : 0;
      for (int panel = stripes.first_panel(piece); panel < last_panel; ++panel) {
        const int column = panel * PANEL;
        const std::byte* next = weight.data + (panel + 1 < last_panel ? panel + 1 : stripes.first_panel(following)) * panel_bytes;
        for (int each = 0; each < count; ++each) {
          const int tile = first_tile + each;
          const Target target{y + tiles.first(tile) * y_stride + column, y_stride, weight.bias ? weight.bias + column : nullptr,
                              std::min(PANEL, weight.out - column), into};
          pick<K>(tiles.size(tile), std::make_integer_sequence<int, K::ROWS>{})(x.tile(tile), weight.data + panel * panel_bytes, lines,
                                                                               Ahead(next + each * per_line * lines * Ahead::CACHE_LINE, per_line), target);
        }
      }
    });
  });
}

void gather(Team& team, const Weight& weight, const int64_t* ids, int count, float* to) {
  with_kind(weight.kind, [&]<typename K>(K) {
    team.run(count, [&](int at) {
      const std::byte* panel = weight.data + ids[at] / PANEL * lines_of(weight.in) * K::LINE_BYTES;
      const int column = static_cast<int>(ids[at] % PANEL);
      for (int k = 0; k < weight.in; ++k)
        to[std::ptrdiff_t{at} * weight.in + k] = K::unpack(panel + k / LINE * K::LINE_BYTES, k % LINE, column);
    });
  });
}

}  // namespace tessera
