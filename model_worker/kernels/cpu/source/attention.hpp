// Attention over a paged cache, which is read in place.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "cached.hpp"
#include "simd.hpp"
#include "team.hpp"

namespace tessera {

constexpr int HEAD_DIM_MAX = 512;

// One layer of a pool: `keys` and `values` are [num_blocks, num_kv_heads, block_size * head_dim]. Of each block and KV head the keys lie transposed, see
// `Cached`. block_size is a multiple of 16; head_dim is at most HEAD_DIM_MAX.
template <typename K>
struct Cache {
  K* keys;
  K* values;
  int num_kv_heads, block_size, head_dim;

  std::ptrdiff_t at(int64_t block, int head) const { return (block * num_kv_heads + head) * block_size * head_dim; }
};

// What a batch says of its rows, see model_worker.batch.Batch.
struct BatchView {
  const int64_t* slots;         // [tokens]
  const int32_t* starts;        // [rows + 1]
  const int32_t* context_lens;  // [rows]
  const int32_t* tables;        // [rows, table_stride]
  int rows, tokens, table_stride;

  int row_of(int token) const { return static_cast<int>(std::upper_bound(starts, starts + rows + 1, token) - starts) - 1; }
  const int32_t* table(int row) const { return tables + std::ptrdiff_t{row} * table_stride; }
  // Positions, its own the last of them.
  int seen_by(int row, int token) const { return context_lens[row] - (starts[row + 1] - 1 - token); }
};

// Rotates the leading `2 * pairs` elements of every head of `qk` [tokens, heads + kv_heads, head_dim] (element i with i + pairs, by cos and sin [tokens,
// pairs]), writes queries to `query` [tokens, heads, head_dim] and keys, with `value` [tokens, kv_heads, head_dim], to the cache. Tokens of qk and of
// value are `qk_stride` and `value_stride` elements apart.
template <typename K>
void rotate_and_store(Team& team, const Cache<K>& cache, const BatchView& batch, const float* qk, std::ptrdiff_t qk_stride, const float* value,
                      std::ptrdiff_t value_stride, const float* cos, const float* sin, int pairs, int heads, float* query);

// The work of attention over a batch, which is the same in every layer: some tokens by heads of one group each. Tokens of rows whose tables begin with the
// same blocks may share a piece: the positions in these are read once for all of them.
class Pieces {
 public:
  struct Piece {
    int token, tokens, kv_head, first_head, heads;
    int shared;  // positions in blocks that all rows of it share
  };

  void cut(const BatchView& batch, int heads, int kv_heads, int block_size);
  int count() const { return static_cast<int>(pieces_.size()); }
  const Piece& at(int piece) const { return pieces_[piece]; }

 private:
  std::vector<Piece> pieces_;
};

// Causal attention of every token over its row's context: `query` and `output` [tokens, heads, head_dim].
// A token's bits depend on its own query and context alone: both passes over the context go in chunks that begin at multiples of CHUNK.
template <typename K>
void attend(Team& team, const Cache<K>& cache, const BatchView& batch, const Pieces& pieces, const float* query, int heads, float scale,
            float* output);

}  // namespace tessera
