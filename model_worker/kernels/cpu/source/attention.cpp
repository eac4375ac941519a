#include "attention.hpp"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

namespace tessera {

namespace {

constexpr int CHUNK = 256;  // positions whose scores are held at a time

constexpr float NOWHERE = -__builtin_inff();

// The rows of one tile: `count` query heads that read the same KV head, token by token; row r sees `limits[r]` positions.
struct Tile {
  int count;
  int limits[ROWS_MAX];
  const float* queries[ROWS_MAX];
  float* outputs[ROWS_MAX];
};

// How many sums of a row go on side by side, so that few rows keep the multipliers busy too: a sum has to wait for its last addition.
constexpr int abreast(int rows) { return rows * 4 <= ROWS_MAX ? 4 : rows * 2 <= ROWS_MAX ? 2 : 1; }

// Scores of the tile's R rows for P times WIDTH positions, each WIDTH in one block: `turned` is [head_dim, R].
template <int R, int P, typename K>
void score(const float* turned, const K* const* keys, int block_size, int head_dim, float scale, float* scores) {
  Vec sums[R][P] = {};
  for (int d = 0; d < head_dim; ++d) {
    Vec key[P];
    for (int at = 0; at < P; ++at) key[at] = load(keys[at] + d * block_size);
#pragma GCC unroll 12
    for (int row = 0; row < R; ++row)
      for (int at = 0; at < P; ++at) sums[row][at] += turned[d * R + row] * key[at];
  }
  for (int row = 0; row < R; ++row)
    for (int at = 0; at < P; ++at) store(scores + row * CHUNK + at * WIDTH, sums[row][at] * scale);
}

// Adds `count` positions' values, weighted, to R rows of sums [R, head_dim], N vectors of each.
template <int R, int N, typename K>
void add_values(const float* weights, const K* values, int count, int head_dim, float* sums) {
  Vec totals[R][N];
  for (int row = 0; row < R; ++row)
    for (int at = 0; at < N; ++at) totals[row][at] = load(sums + row * head_dim + at * WIDTH);
  for (int position = 0; position < count; ++position) {
    Vec value[N];
    for (int at = 0; at < N; ++at) value[at] = load(values + position * head_dim + at * WIDTH);
#pragma GCC unroll 12
    for (int row = 0; row < R; ++row)
      for (int at = 0; at < N; ++at) totals[row][at] += weights[row * CHUNK + position] * value[at];
  }
  for (int row = 0; row < R; ++row)
    for (int at = 0; at < N; ++at) store(sums + row * head_dim + at * WIDTH, totals[row][at]);
}

// Turns the scores of one row's chunk into weights of its softmax so far. Returns what the earlier ones are to be multiplied by.
inline float weigh(float* scores, int visible, int padded, float& most, float& total) {
  for (int at = std::max(0, visible); at < padded; ++at) scores[at] = NOWHERE;
  Vec best = broadcast(NOWHERE);
  for (int at = 0; at < padded; at += WIDTH) {
    const Vec value = load(scores + at);
    best = value != value ? value : maximum(value, best);  // a NaN stays one
  }
  float now = largest(best);
  for (int lane = 0; lane < WIDTH; ++lane)
    if (best[lane] != best[lane]) now = best[lane];
  now = now > most || now != now ? now : most;
  if (now == NOWHERE) {
    for (int at = 0; at < padded; ++at) scores[at] = 0.0f;
    return 1.0f;
  }
  Vec sums{};
  for (int at = 0; at < padded; at += WIDTH) {
    const Vec weight = exponential(load(scores + at) - now);
    store(scores + at, weight);
    sums += weight;
  }
  const float factor = most == NOWHERE ? 0.0f : exponential(broadcast(most - now))[0];
  total = total * factor + sum(sums);
  most = now;
  return factor;
}

template <int R, typename K>
void attend_tile(const Cache<K>& cache, int kv_head, const int32_t* table, const Tile& tile, float scale, float* memory) {
  constexpr int P = abreast(R), N = std::max(2, P);
  const int head_dim = cache.head_dim, block_size = cache.block_size;
  float* turned = memory;                 // [head_dim, R]
  float* scores = turned + R * head_dim;  // [R, CHUNK]
  float* sums = scores + R * CHUNK;       // [R, head_dim]
  for (int row = 0; row < R; ++row)
    for (int d = 0; d < head_dim; ++d) turned[d * R + row] = tile.queries[row][d];
  std::fill(sums, sums + R * head_dim, 0.0f);
  float most[R], total[R] = {};
  std::fill(most, most + R, NOWHERE);
  const int end = *std::max_element(tile.limits, tile.limits + R);
  for (int start = 0; start < end; start += CHUNK) {
    const int count = std::min(CHUNK, end - start), padded = (count + WIDTH - 1) / WIDTH * WIDTH;
    const K* keys[CHUNK / WIDTH];
    for (int at = 0; at < padded; at += WIDTH) {
      const int position = start + at;
      keys[at / WIDTH] = cache.keys + cache.at(table[position / block_size], kv_head) + position % block_size;
    }
    int at = 0;
    for (; at + P * WIDTH <= padded; at += P * WIDTH) score<R, P>(turned, keys + at / WIDTH, block_size, head_dim, scale, scores + at);
    for (; at < padded; at += WIDTH) score<R, 1>(turned, keys + at / WIDTH, block_size, head_dim, scale, scores + at);
    for (int row = 0; row < R; ++row) {
      const float factor = weigh(scores + row * CHUNK, tile.limits[row] - start, padded, most[row], total[row]);
      if (factor != 1.0f)
        for (int d = 0; d < head_dim; ++d) sums[row * head_dim + d] *= factor;
    }
    for (at = 0; at < count;) {
      const int position = start + at, offset = position % block_size;
      const int run = std::min(block_size - offset, count - at);
      const K* values = cache.values + cache.at(table[position / block_size], kv_head) + std::ptrdiff_t{offset} * head_dim;
      int d = 0;
      for (; d + N * WIDTH <= head_dim; d += N * WIDTH) add_values<R, N>(scores + at, values + d, run, head_dim, sums + d);
      for (; d + WIDTH <= head_dim; d += WIDTH) add_values<R, 1>(scores + at, values + d, run, head_dim, sums + d);
      for (; d < head_dim; ++d)
        for (int position = 0; position < run; ++position) {
          const float value = load_one(values + position * head_dim + d);
          for (int row = 0; row < R; ++row) sums[row * head_dim + d] += scores[row * CHUNK + at + position] * value;
        }
      at += run;
    }
  }
  for (int row = 0; row < R; ++row)
    for (int d = 0; d < head_dim; ++d) tile.outputs[row][d] = sums[row * head_dim + d] / total[row];
}

template <typename K>
using AttendTile = void (*)(const Cache<K>&, int, const int32_t*, const Tile&, float, float*);

template <typename K, int... R>
constexpr AttendTile<K> pick(int rows, std::integer_sequence<int, R...>) {
  constexpr AttendTile<K> all[] = {attend_tile<R + 1, K>...};
  return all[rows - 1];
}

// Some tokens of one row and some heads of one group, which are one tile.
struct Piece {
  int row, token, tokens, kv_head, first_head, heads;
};

}  // namespace

template <typename K>
void rotate_and_store(Team& team, const Cache<K>& cache, const BatchView& batch, const float* qk, std::ptrdiff_t qk_stride, const float* value,
                      std::ptrdiff_t value_stride, const float* cos, const float* sin, int pairs, int heads, float* query) {
  constexpr int TOKENS = 8;
  const int head_dim = cache.head_dim, kv_heads = cache.num_kv_heads, block_size = cache.block_size;
  team.run((batch.tokens + TOKENS - 1) / TOKENS, [&](int piece) {
    float rotated[HEAD_DIM_MAX];
    for (int token = piece * TOKENS; token < std::min(batch.tokens, (piece + 1) * TOKENS); ++token) {
      const float *c = cos + std::ptrdiff_t{token} * pairs, *s = sin + std::ptrdiff_t{token} * pairs;
      const int64_t block = batch.slots[token] / block_size;
      const int offset = static_cast<int>(batch.slots[token] % block_size);
      for (int head = 0; head < heads + kv_heads; ++head) {
        const float* from = qk + token * qk_stride + std::ptrdiff_t{head} * head_dim;
        float* to = head < heads ? query + (std::ptrdiff_t{token} * heads + head) * head_dim : rotated;
        for (int i = 0; i < pairs; ++i) {
          const float first = from[i], second = from[i + pairs];
          to[i] = first * c[i] - second * s[i];
          to[i + pairs] = second * c[i] + first * s[i];
        }
        for (int i = 2 * pairs; i < head_dim; ++i) to[i] = from[i];
        if (head < heads) continue;
        const int kv_head = head - heads;
        K* keys = cache.keys + cache.at(block, kv_head) + offset;
        for (int d = 0; d < head_dim; ++d) store_one(keys + std::ptrdiff_t{d} * block_size, rotated[d]);
        const float* values_from = value + token * value_stride + std::ptrdiff_t{kv_head} * head_dim;
        K* values = cache.values + cache.at(block, kv_head) + std::ptrdiff_t{offset} * head_dim;
        for (int d = 0; d < head_dim; ++d) store_one(values + d, values_from[d]);
      }
    }
  });
}

template <typename K>
void attend(Team& team, const Cache<K>& cache, const BatchView& batch, const float* query, int heads, float scale, float* output) {
  const int group = heads / cache.num_kv_heads, head_dim = cache.head_dim;
  const int heads_of_piece = std::min(group, ROWS_MAX), tokens_of_piece = ROWS_MAX / heads_of_piece;
  static thread_local std::vector<Piece> pieces;
  pieces.clear();
  for (int row = 0; row < batch.rows; ++row)
    for (int token = batch.starts[row]; token < batch.starts[row + 1]; token += tokens_of_piece)
      for (int kv_head = 0; kv_head < cache.num_kv_heads; ++kv_head)
        for (int head = 0; head < group; head += heads_of_piece)
          pieces.push_back({row, token, std::min(tokens_of_piece, batch.starts[row + 1] - token), kv_head, kv_head * group + head,
                            std::min(heads_of_piece, group - head)});
  const Piece* all = pieces.data();
  // The last pieces of a prompt see the most, so they go first.
  const int count = static_cast<int>(pieces.size());
  team.run(count, [&](int at) {
    const Piece& piece = all[count - 1 - at];
    static thread_local std::vector<float> memory;
    memory.resize(std::max(memory.size(), std::size_t(ROWS_MAX) * (2 * head_dim + CHUNK)));
    const int earlier = batch.context_lens[piece.row] - (batch.starts[piece.row + 1] - batch.starts[piece.row]);
    Tile tile{};
    for (int token = piece.token; token < piece.token + piece.tokens; ++token)
      for (int head = piece.first_head; head < piece.first_head + piece.heads; ++head, ++tile.count) {
        const std::ptrdiff_t where = (std::ptrdiff_t{token} * heads + head) * head_dim;
        tile.limits[tile.count] = earlier + token - batch.starts[piece.row] + 1;
        tile.queries[tile.count] = query + where;
        tile.outputs[tile.count] = output + where;
      }
    const auto run = pick<K>(tile.count, std::make_integer_sequence<int, ROWS_MAX>{});
    run(cache, piece.kv_head, batch.tables + std::ptrdiff_t{piece.row} * batch.table_stride, tile, scale, memory.data());
  });
}

#define TESSERA_ATTENTION(K)                                                                                                                    \
  template void rotate_and_store<K>(Team&, const Cache<K>&, const BatchView&, const float*, std::ptrdiff_t, const float*, std::ptrdiff_t,       \
                                    const float*, const float*, int, int, float*);                                                      \
  template void attend<K>(Team&, const Cache<K>&, const BatchView&, const float*, int, float, float*);
TESSERA_ATTENTION(float)
TESSERA_ATTENTION(Half)

}  // namespace tessera
