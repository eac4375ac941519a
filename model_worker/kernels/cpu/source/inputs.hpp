// Rows that are to be multiplied, in the form in which a kind of weight takes them.
#pragma once

#include <vector>

#include "tiles.hpp"
#include "with_kind.hpp"

namespace tessera {

// [rows, in] in tiles of at most so many rows as the kind has sums for; of each tile [lines, rows of the tile] lines. Keeps its memory.
class Inputs {
 public:
  void fit(Kind kind, int rows, int in) {
    kind_ = kind;
    in_ = in;
    with_plain(kind, [&]<typename K>(K) {
      tiles_ = Tiles(rows, K::ROWS);
      row_bytes_ = lines_of(in) * K::ROW_BYTES;
    });
    memory_.resize(std::max(memory_.size(), rows * row_bytes_));
  }

  const Tiles& tiles() const { return tiles_; }
  std::size_t row_bytes() const { return row_bytes_; }
  // Of all rows of a tile.
  std::byte* line(int tile, int line) { return memory_.data() + tiles_.first(tile) * row_bytes_ + line * (tiles_.size(tile) * row_bytes_ / lines_of(in_)); }
  const std::byte* tile(int tile) const { return memory_.data() + tiles_.first(tile) * row_bytes_; }

  // Row `row` is from[0 .. in).
  void put(int row, const float* from) {
    const int tile = tiles_.of(row), rows = tiles_.size(tile), first = tiles_.first(tile);
    std::byte* to = memory_.data() + first * row_bytes_;
    with_plain(kind_, [&]<typename K>(K) {
      int at = 0;
      for (; at + LINE <= in_; at += LINE, to += rows * K::ROW_BYTES) K::put(from + at, to, row - first, rows);
      if (at == in_) return;
      float rest[LINE] = {};
      std::copy(from + at, from + in_, rest);
      K::put(rest, to, row - first, rows);
    });
  }

 private:
  Kind kind_ = Kind::F32;
  int in_ = 0;
  Tiles tiles_{0, 1};
  std::size_t row_bytes_ = 0;
  std::vector<std::byte> memory_;
};

}  // namespace tessera
