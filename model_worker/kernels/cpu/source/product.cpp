#include "product.hpp"

#include "rows.hpp"

#include <atomic>
#include <type_traits>
#include <utility>
#include <vector>

namespace tessera {

namespace {

// Where the sums of a tile go: its first row and column of y.
struct Target {
  float* y;
  std::ptrdiff_t stride;
  const float* bias;
  int columns;  // fewer than PANEL in the last panel
  Into into;
};

void finish(const float* sums, const Target& target, float* y) {
  if (target.columns == PANEL) {
    for (int at = 0; at < PANEL; at += WIDTH) {
      Vec result = load(sums + at);
      if (target.bias) result += load(target.bias + at);
      if (target.into == Into::SUM) result += load(y + at);
      store(y + at, result);
    }
    return;
  }
  for (int column = 0; column < target.columns; ++column) {
    const float result = target.bias ? sums[column] + target.bias[column] : sums[column];
    y[column] = target.into == Into::SUM ? result + y[column] : result;
  }
}

// Some lines of a tile by those of a panel: they begin its sums [R, PANEL], or are added to them.
template <typename K, typename Ahead, int R>
void add_lines(const std::byte* x, const typename K::Source& weights, int lines, Ahead ahead, float* sums, bool is_first) {
  Vec totals[R][2];
  if (is_first) {
#pragma GCC unroll 12
    for (int row = 0; row < R; ++row) totals[row][0] = totals[row][1] = Vec{};
  } else {
#pragma GCC unroll 12
    for (int row = 0; row < R; ++row)
      for (int half = 0; half < 2; ++half) totals[row][half] = load(sums + row * PANEL + half * WIDTH);
  }
  K::template add<R>(x, weights, lines, totals, ahead);
#pragma GCC unroll 12
  for (int row = 0; row < R; ++row)
    for (int half = 0; half < 2; ++half) store(sums + row * PANEL + half * WIDTH, totals[row][half]);
}

template <typename K, typename Ahead>
using AddLines = void (*)(const std::byte*, const typename K::Source&, int, Ahead, float*, bool);

template <typename K, typename Ahead, int... R>
AddLines<K, Ahead> pick(int rows, std::integer_sequence<int, R...>) {
  static constexpr AddLines<K, Ahead> all[] = {add_lines<K, Ahead, R + 1>...};
  return all[rows - 1];
}

template <typename K, typename Ahead>
void add_lines_of(int rows, const std::byte* x, const typename K::Source& weights, int lines, Ahead ahead, float* sums, bool is_first) {
  pick<K, Ahead>(rows, std::make_integer_sequence<int, K::ROWS>{})(x, weights, lines, ahead, sums, is_first);
}

struct alignas(CACHE_LINE) CacheLine {
  std::byte bytes[CACHE_LINE];
};

// Some tiles of inputs by one panel after the other, each of `lines` lines.
template <typename K>
class Strip {
  using Plain = typename K::Plain;
  static constexpr bool IS_PLAIN = std::is_same_v<K, Plain>;

 public:
  Strip(const Inputs& x, int first_tile, int count, int lines) : x_(x), first_(first_tile), count_(count), lines_(lines) {}

  // `next` is the panel that comes after this one, `target(tile)` says where the sums of a tile go.
  template <typename TargetOf>
  void multiply(const std::byte* panel, const std::byte* next, const TargetOf& target) const {
    if (count_ == 1) {
      add_lines_of<K>(rows(0), x(0, 0), source(panel), lines_, Onward(next, lines_), sums_, true);
      finish_tile(0, sums_, target);
    } else if (count_ <= FEW) {
      in_blocks(panel, next, target);
    } else {
      at_once(panel, next, target);
    }
  }

 private:
  static constexpr int FEW = 48 / K::ROWS;  // more are so much work that taking up sums again would cost more than waiting for the weights
  static constexpr int MANY = 16;           // more do not even notice the first one's waiting
  static constexpr int BLOCK = (20 << 10) / Plain::LINE_BYTES;  // lines; two blocks fit a first-level cache of 48 KiB
  static constexpr int CACHE_LINES = (K::LINE_BYTES + CACHE_LINE - 1) / CACHE_LINE;  // of a line

  // A block of the panel by all tiles, then the next. Meanwhile that one comes from memory, a part of it beside each tile.
  template <typename TargetOf>
  void in_blocks(const std::byte* panel, const std::byte* next, const TargetOf& target) const {
    const int per_line = (CACHE_LINES + count_ - 1) / count_;
    const Tiles blocks(lines_, BLOCK);
    for (int block = 0; block < blocks.count; ++block) {
      const int first = blocks.first(block), lines = blocks.size(block), end = first + lines;
      const std::byte* following = end < lines_ ? panel + end * K::LINE_BYTES : next;
      const auto weights = source(panel + first * K::LINE_BYTES, lines);
      for (int tile = 0; tile < count_; ++tile) {
        float* sums = sums_ + tile * K::ROWS * PANEL;
        const Apart<true> ahead(following + std::ptrdiff_t{tile} * per_line * lines * CACHE_LINE, per_line);
        add_to(sums, tile, first, weights, lines, ahead);
        if (end == lines_) finish_tile(tile, sums, target);
      }
    }
  }

  // The whole panel by one tile after the other. The next comes into the second-level cache, a part of it beside each.
  template <typename TargetOf>
  void at_once(const std::byte* panel, const std::byte* next, const TargetOf& target) const {
    const int per_line = count_ <= MANY || !IS_PLAIN ? (CACHE_LINES + count_ - 1) / count_ : 0;
    const auto weights = source(panel, lines_);
    for (int tile = 0; tile < count_; ++tile) {
      const Apart<false> ahead(next + std::ptrdiff_t{tile} * per_line * lines_ * CACHE_LINE, per_line);
      add_to(sums_, tile, 0, weights, lines_, ahead);
      finish_tile(tile, sums_, target);
    }
  }

  // Lines of a panel; of those that are not plain, `kept` stay for further tiles when they have come out for the first.
  static typename K::Source source(const std::byte* lines, int kept = 0) {
    if constexpr (IS_PLAIN) {
      return lines;
    } else {
      plain_.resize(std::max(plain_.size(), std::max(kept, 1) * Plain::LINE_BYTES / CACHE_LINE));
      return {lines, plain_.data()->bytes, kept > 0};
    }
  }

  template <typename Ahead>
  void add_to(float* sums, int tile, int first, const typename K::Source& weights, int lines, Ahead ahead) const {
    const std::byte* inputs = x(tile, first);
    if constexpr (!IS_PLAIN)
      if (tile > 0) return add_lines_of<Plain>(rows(tile), inputs, weights.plain, lines, ahead, sums, first == 0);
    add_lines_of<K>(rows(tile), inputs, weights, lines, ahead, sums, first == 0);
  }

  int rows(int tile) const { return x_.tiles().size(first_ + tile); }
  const std::byte* x(int tile, int line) const { return x_.tile(first_ + tile) + line * rows(tile) * K::ROW_BYTES; }

  template <typename TargetOf>
  void finish_tile(int tile, const float* sums, const TargetOf& target_of) const {
    const Target target = target_of(first_ + tile);
    for (int row = 0; row < rows(tile); ++row) finish(sums + row * PANEL, target, target.y + row * target.stride);
  }

  const Inputs& x_;
  int first_, count_, lines_;
  alignas(CACHE_LINE) static thread_local float sums_[FEW * K::ROWS * PANEL];
  static thread_local std::vector<CacheLine> plain_;
};

template <typename K>
alignas(CACHE_LINE) thread_local float Strip<K>::sums_[FEW * K::ROWS * PANEL];

template <typename K>
thread_local std::vector<CacheLine> Strip<K>::plain_;

// A product's pieces: stripes of tiles by groups of panels, or of lines of outputs.
class Plan {
 public:
  Plan(const Team& team, const Inputs& x, int panels) : threads_(team.size()), stripes_(x.tiles(), static_cast<int>(x.row_bytes()), panels, threads_) {}

  int pieces() const { return stripes_.count(); }
  int first_tile(int piece) const { return stripes_.first_tile(piece); }
  int tiles(int piece) const { return stripes_.last_tile(piece) - stripes_.first_tile(piece); }

  // Calls `work(panel, next)` for each panel of a piece: `next` comes after `panel`, here or in the piece that this thread takes next.
  template <typename Work>
  void run(int piece, const Work& work) const {
    const int following = std::min(piece + threads_, stripes_.count() - 1), last = stripes_.last_panel(piece);
    for (int panel = stripes_.first_panel(piece); panel < last; ++panel) work(panel, panel + 1 < last ? panel + 1 : stripes_.first_panel(following));
  }

 private:
  int threads_;
  Stripes stripes_;
};

// [LINE, PANEL] of a matrix, filled up with zeros.
struct Numbers {
  Numbers(const Matrix& from, int panel, int line) {
    const float* first = from.data + panel * PANEL * from.out_stride + line * LINE * from.in_stride;
    for (int column = 0; column < std::min(PANEL, from.out - panel * PANEL); ++column)
      for (int k = 0; k < std::min(LINE, from.in - line * LINE); ++k)
        all[k * PANEL + column] = first[column * from.out_stride + k * from.in_stride];
  }
  float all[LINE * PANEL] = {};
};

}  // namespace

std::size_t bytes_of(Kind kind, int out, int in) {
  return with_kind(kind, [&]<typename K>(K) { return std::size_t(panels_of(out)) * lines_of(in) * K::LINE_BYTES; });
}

bool pack(Team& team, const Matrix& from, const Weight& to) {
  std::atomic<bool> fits{true};
  with_kind(to.kind, [&]<typename K>(K) {
    const int lines = lines_of(from.in);
    team.run(panels_of(from.out), [&](int panel) {
      std::byte* target = to.data + std::ptrdiff_t{panel} * lines * K::LINE_BYTES;
      for (int line = 0; line < lines && fits; ++line, target += K::LINE_BYTES)
        if (!K::pack(Numbers(from, panel, line).all, target)) fits = false;
    });
  });
  return fits;
}

void multiply(Team& team, const Inputs& x, const Weight& weight, float* y, std::ptrdiff_t y_stride, Into into) {
  with_kind(weight.kind, [&]<typename K>(K) {
    const int lines = lines_of(weight.in);
    const Plan plan(team, x, panels_of(weight.out));
    const auto panel_at = [&](int panel) { return weight.data + std::ptrdiff_t{panel} * lines * K::LINE_BYTES; };
    team.run(plan.pieces(), [&](int piece) {
      const Strip<K> strip(x, plan.first_tile(piece), plan.tiles(piece), lines);
      plan.run(piece, [&](int panel, int next) {
        const int column = panel * PANEL, columns = std::min(PANEL, weight.out - column);
        strip.multiply(panel_at(panel), panel_at(next), [&](int tile) {
          return Target{y + x.tiles().first(tile) * y_stride + column, y_stride, weight.bias ? weight.bias + column : nullptr, columns, into};
        });
      });
    });
  });
}

void multiply_gated(Team& team, const Inputs& x, const Weight& weight, Inputs& to) {
  constexpr int PANELS = LINE / PANEL, PARTS = 2 * PANELS;  // of a line of outputs: gates, then what they are for
  with_kind(weight.kind, [&]<typename K>(K) {
    const int lines = lines_of(weight.in), inner = weight.out / 2;
    const Plan plan(team, x, inner / LINE);
    const auto panel_of = [&](int line, int part) { return part / PANELS * (inner / PANEL) + line * PANELS + part % PANELS; };
    const auto panel_at = [&](int panel) { return weight.data + std::ptrdiff_t{panel} * lines * K::LINE_BYTES; };
    team.run(plan.pieces(), [&](int piece) {
      const int first_tile = plan.first_tile(piece), tiles = plan.tiles(piece);
      const Strip<K> strip(x, first_tile, tiles, lines);
      constexpr int TILE_SUMS = K::ROWS * 2 * LINE;
      float* sums = row_memory(tiles * TILE_SUMS);  // of each tile [rows, 2, LINE]
      plan.run(piece, [&](int line, int next) {
        for (int part = 0; part < PARTS; ++part) {
          const int panel = panel_of(line, part), after = part + 1 < PARTS ? panel_of(line, part + 1) : panel_of(next, 0);
          strip.multiply(panel_at(panel), panel_at(after), [&](int tile) {
            float* target = sums + (tile - first_tile) * TILE_SUMS + part * PANEL;
            return Target{target, 2 * LINE, weight.bias ? weight.bias + panel * PANEL : nullptr, PANEL, Into::PLACE};
          });
        }
        for (int tile = first_tile; tile < first_tile + tiles; ++tile) {
          std::byte* out = to.line(tile, line);
          const int rows = x.tiles().size(tile);
          for (int row = 0; row < rows; ++row) {
            float values[LINE];
            silu_and_mul(sums + (tile - first_tile) * TILE_SUMS + row * 2 * LINE, values, LINE);
            K::put(values, out, row, rows);
          }
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
      float* row = to + std::ptrdiff_t{at} * weight.in;
      for (int k = 0; k < weight.in; k += LINE, panel += K::LINE_BYTES) K::unpack(panel, column, std::min(LINE, weight.in - k), row + k);
    });
  });
}

}  // namespace tessera
