// How a product is cut into pieces.
#pragma once

#include <algorithm>

namespace tessera {

// Rows cut into tiles of at most `most`, of as equal a size as can be, the larger ones first.
struct Tiles {
  Tiles(int rows, int most) : rows(rows), count((rows + most - 1) / most) {}
  int first(int tile) const { return tile * (rows / count) + std::min(tile, rows % count); }
  int size(int tile) const { return rows / count + (tile < rows % count); }
  int of(int row) const {
    const int least = rows / count, larger = rows % count * (least + 1);
    return row < larger ? row / (least + 1) : rows % count + (row - larger) / least;
  }
  int rows, count;
};

// Pieces for a team: some tiles by some panels of outputs each. What a thread reads over and over, panel after panel, are the inputs of its tiles,
// `row_bytes` per row: they should stay in its second-level cache.
class Stripes {
 public:
  Stripes(const Tiles& tiles, int row_bytes, int panels, int threads) : tiles_(tiles), panels_(panels) {
    const int tile_bytes = std::max(1, tiles.rows / tiles.count) * row_bytes;
    stripe_ = std::max(1, STRIPE_BYTES / tile_bytes);
    stripes_ = (tiles.count + stripe_ - 1) / stripe_;
    // The fewer pieces, the longer a thread reads on at one place, which memory answers faster; many rows are bound by multiplying, and whoever has the last
    // piece of these keeps the others waiting for longer.
    const int of_thread = tiles.count <= FEW_TILES ? 2 : 8;
    const int wanted = std::max(1, of_thread * threads / stripes_);
    group_ = std::clamp(panels / wanted, 1, 16);
    groups_ = (panels + group_ - 1) / group_;
  }
  int count() const { return stripes_ * groups_; }
  int first_tile(int piece) const { return piece / groups_ * stripe_; }
  int last_tile(int piece) const { return std::min(tiles_.count, first_tile(piece) + stripe_); }
  int first_panel(int piece) const { return piece % groups_ * group_; }
  int last_panel(int piece) const { return std::min(panels_, first_panel(piece) + group_); }

 private:
  static constexpr int STRIPE_BYTES = 256 << 10, FEW_TILES = 4;
  Tiles tiles_;
  int panels_, stripe_, stripes_, group_, groups_;
};

}  // namespace tessera
