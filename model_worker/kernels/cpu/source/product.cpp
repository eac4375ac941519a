#include "product.hpp"

#include "rows.hpp"

#include <type_traits>
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

template <typename K, typename Ahead, int R>
void tile(const std::byte* x, const std::byte* panel, int lines, Ahead ahead, const Target& target) {
  Vec sums[R][2] = {};
  K::template add<R>(x, panel, lines, sums, ahead);
  for (int row = 0; row < R; ++row) finish(sums[row], target, target.y + row * target.stride);
}

template <typename Ahead>
using Tile = void (*)(const std::byte*, const std::byte*, int, Ahead, const Target&);

template <typename K, typename Ahead, int... R>
Tile<Ahead> pick(int rows, std::integer_sequence<int, R...>) {
  static constexpr Tile<Ahead> all[] = {tile<K, Ahead, R + 1>...};
  return all[rows - 1];
}

template <typename K, typename Ahead>
void multiply_tile(int rows, const std::byte* x, const std::byte* panel, int lines, Ahead ahead, const Target& target) {
  pick<K, Ahead>(rows, std::make_integer_sequence<int, K::ROWS>{})(x, panel, lines, ahead, target);
}

// A product's pieces: stripes of tiles by groups of panels, or of lines of outputs, `panel_bytes` of weights each.
class Plan {
 public:
  template <typename K>
  Plan(K, const Team& team, const Inputs& x, int lines, int panels)
      : threads_(team.size()), stripes_(x.tiles(), static_cast<int>(x.row_bytes()), panels, threads_) {
    panel_bytes = lines * K::LINE_BYTES;
    cache_lines_ = static_cast<int>(K::LINE_BYTES) / CACHE_LINE;
    lines_ = lines;
  }

  int pieces() const { return stripes_.count(); }

  // Calls `work(panel, next, tile, ahead)` for each of a piece: `next` is the panel that comes after `panel`, and `ahead(weights)` asks for this tile's part
  // of these.
  template <typename Work>
  void run(int piece, const Work& work) const {
    const int first_tile = stripes_.first_tile(piece), count = stripes_.last_tile(piece) - first_tile, last_panel = stripes_.last_panel(piece);
    const int following = std::min(piece + threads_, stripes_.count() - 1);
    // While the tiles of one panel are multiplied, the next panel comes from memory, a part of it beside each. Among many the first one's waiting does not
    // count.
    const int per_line = count <= AHEAD_TILES ? (cache_lines_ + count - 1) / count : 0;
    for (int panel = stripes_.first_panel(piece); panel < last_panel; ++panel) {
      const int next = panel + 1 < last_panel ? panel + 1 : stripes_.first_panel(following);
      if (count == 1) {
        work(panel, next, first_tile, [&](const std::byte* weights) { return Onward(weights, lines_); });
        continue;
      }
      for (int each = 0; each < count; ++each) {
        const std::ptrdiff_t done = std::ptrdiff_t{each} * per_line * lines_ * CACHE_LINE;
        work(panel, next, first_tile + each, [&](const std::byte* weights) { return Apart(weights + done, per_line); });
      }
    }
  }

  std::size_t panel_bytes;

 private:
  int threads_, cache_lines_, lines_;
  Stripes stripes_;
};

}  // namespace

std::size_t bytes_of(Kind kind, int out, int in) {
  return with_kind(kind, [&]<typename K>(K) { return std::size_t(panels_of(out)) * lines_of(in) * K::LINE_BYTES; });
}

void pack(Team& team, const float* from, std::ptrdiff_t out_stride, std::ptrdiff_t in_stride, const Weight& to) {
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
  with_kind(weight.kind, [&]<typename K>(K kind) {
    const int lines = lines_of(weight.in);
    const Tiles& tiles = x.tiles();
    const Plan plan(kind, team, x, lines, panels_of(weight.out));
    team.run(plan.pieces(), [&](int piece) {
      plan.run(piece, [&](int panel, int next, int tile, const auto& ahead) {
        const int column = panel * PANEL;
        const Target target{y + tiles.first(tile) * y_stride + column, y_stride, weight.bias ? weight.bias + column : nullptr,
                            std::min(PANEL, weight.out - column), into};
        const auto follows = ahead(weight.data + next * plan.panel_bytes);
        multiply_tile<K>(tiles.size(tile), x.tile(tile), weight.data + panel * plan.panel_bytes, lines, follows, target);
      });
    });
  });
}

void multiply_gated(Team& team, const Inputs& x, const Weight& weight, Inputs& to) {
  constexpr int PANELS = LINE / PANEL;  // of a line of outputs
  with_kind(weight.kind, [&]<typename K>(K kind) {
    const int lines = lines_of(weight.in), inner = weight.out / 2;
    const Tiles& tiles = x.tiles();
    const Plan plan(kind, team, x, lines, inner / LINE);
    team.run(plan.pieces(), [&](int piece) {
      plan.run(piece, [&](int line, int next, int tile, const auto& ahead) {
        constexpr bool IS_ONCE = std::is_same_v<decltype(ahead(nullptr)), Onward>;
        const int rows = tiles.size(tile);
        const auto panel_of = [&](int line, int part) { return part / PANELS * (inner / PANEL) + part % PANELS + line * PANELS; };
        float halves[K::ROWS * 2 * LINE];  // [rows, 2, LINE]
        for (int part = 0; part < 2 * PANELS; ++part) {
          const int panel = panel_of(line, part);
          const Target target{halves + part * PANEL, 2 * LINE, weight.bias ? weight.bias + panel * PANEL : nullptr, PANEL, Into::PLACE};
          const int after = !IS_ONCE ? panel_of(next, part) : part + 1 < 2 * PANELS ? panel_of(line, part + 1) : panel_of(next, 0);
          const auto follows = ahead(weight.data + after * plan.panel_bytes);
          multiply_tile<K>(rows, x.tile(tile), weight.data + panel * plan.panel_bytes, lines, follows, target);
        }
        std::byte* out = to.line(tile, line);
        for (int row = 0; row < rows; ++row) {
          float values[LINE];
          silu_and_mul(halves + row * 2 * LINE, values, LINE);
          K::put(values, out, row, rows);
        }
      });
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
