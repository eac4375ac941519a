// Operations on each row of a batch by itself.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "simd.hpp"
#include "team.hpp"
#include "tiles.hpp"

namespace tessera {

// to = from / sqrt(mean(from ** 2) + eps) * weight, of `size` elements; `to` may be `from`.
void normalise(const float* from, const float* weight, float eps, float* to, int size);

// to [n] = silu(from[:n]) * from[n:].
void silu_and_mul(const float* from, float* to, int n);

// Calls `work(row)` for each of `rows` rows of `size` elements. A piece of them is worth handing over.
template <typename Work>
void by_rows(Team& team, int rows, int size, const Work& work) {
  constexpr int64_t PIECE_ELEMENTS = 4096;
  if (!rows) return;
  const int64_t pieces = std::min<int64_t>({rows, 8 * team.size(), int64_t{rows} * size / PIECE_ELEMENTS});
  const Tiles cut(rows, static_cast<int>((rows + pieces) / (pieces + 1)));
  team.run(cut.count, [&](int piece) {
    for (int row = cut.first(piece); row < cut.first(piece) + cut.size(piece); ++row) work(row);
  });
}

// Memory of the thread that asks, for `size` numbers; until it asks again.
inline float* row_memory(int size) {
  static thread_local std::vector<float> memory;
  memory.resize(std::max(memory.size(), std::size_t(size)));
  return memory.data();
}

}  // namespace tessera
