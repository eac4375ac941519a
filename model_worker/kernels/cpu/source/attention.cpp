#include "attention.hpp"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

namespace tessera {

namespace {

constexpr int CHUNK = 256;           // positions whose scores are held at a time
constexpr int RUN = 16;              // positions that lie side by side in any block
constexpr int RUNS = CHUNK / RUN;

constexpr float NOWHERE = -__builtin_inff();

template <typename K>
using FactorOf = typename Cached<K>::Factor;

// Query rows of a tile that read the same table: [first, first + count), of which the last sees `end` positions.
struct Part {
  int first, count, end;
  const int32_t* table;
};

// Query heads that read the same KV head, token by token; row r sees `limits[r]` positions, of which all read the first `shared` in the same blocks.
struct Tile {
  int count = 0, parts = 0, shared = 0;
  int limits[ROWS_MAX];
  const float* queries[ROWS_MAX];
  float* outputs[ROWS_MAX];
  Part part[ROWS_MAX];
};

// How many sums of a row go on side by side: few rows are to keep the multipliers busy too, since a sum has to wait for its last addition. With what they
// are made of they fill the registers.
constexpr int abreast(int rows) {
  constexpr int REGISTERS = WIDTH == 16 ? 32 : 16;
  for (int each = 8; each > 2; each /= 2)
    if (each * (rows + 1) + 1 <= REGISTERS) return each;
  return 2;
}

inline void prefetch(const void* from) { _mm_prefetch(static_cast<const char*>(from), _MM_HINT_T0); }

// Few rows read faster than memory answers, so they ask ahead; many read what lies near already.
constexpr bool asks_ahead(int rows) { return rows <= 6; }

// Where the keys (each WIDTH positions) and the values (each RUN) of a table's positions lie. Keys behind the last ones are the last again, so that they
// can be read by the group.
template <typename K>
struct Places {
  const K* keys[CHUNK / WIDTH];
  const K* values[RUNS];

  // Of [start + from, start + end), as if `start` were the first.
  void find(const Cache<K>& cache, int kv_head, const int32_t* table, int start, int from, int end) {
    int at = from;
    for (; at < end; at += RUN) {
      const int position = start + at, offset = position % cache.block_size;
      const std::ptrdiff_t block = cache.at(table[position / cache.block_size], kv_head);
      for (int part = 0; part < RUN; part += WIDTH) keys[(at + part) / WIDTH] = cache.keys + block + key_at<K>(offset + part);
      values[at / RUN] = cache.values + block + value_at<K>(offset, cache.head_dim);
    }
    for (; (at - from) % (GROUP * WIDTH) && at < CHUNK; at += WIDTH) keys[at / WIDTH] = keys[(end - 1) / WIDTH];
    for (at = end; at < CHUNK && (at - from) % (GROUP * WIDTH); at += RUN) values[at / RUN] = values[(end - 1) / RUN];
  }

  static constexpr int GROUP = 8;  // vectors that are read abreast at most
};

// Scores of R rows for P times WIDTH positions; `turned` [head_dim / AT_ONCE, stride] begins with the rows' first, `keys` and `values` say where they lie.
// Of the keys, `following` more will be read next.
template <int R, int P, typename K>
void score(const FactorOf<K>* turned, int stride, const K* const* keys, const K* const* values, int following, int block_size, int head_dim, float scale,
           float* scores) {
  constexpr int AT_ONCE = Cached<K>::AT_ONCE;
  constexpr int STEP = 64 / (RUN * sizeof(K));  // elements of a run's values that fill a cache line, an element for all its positions
  Vec sums[R][P] = {};
  for (int start = 0; start < head_dim; start += STEP) {
    if (asks_ahead(R))
      for (int at = 0; at < P; ++at) {
        if (at % (RUN / WIDTH) == 0) prefetch(values[at * WIDTH / RUN] + start * RUN);
        if (at < following) prefetch(keys[at + P] + start * block_size);
      }
    for (int d = start; d < start + STEP; d += AT_ONCE) {
      typename Cached<K>::Numbers key[P];
      for (int at = 0; at < P; ++at) key[at] = Cached<K>::read(keys[at] + d * block_size);
#pragma GCC unroll 12
      for (int row = 0; row < R; ++row)
        for (int at = 0; at < P; ++at) Cached<K>::add(sums[row][at], turned[d / AT_ONCE * stride + row], key[at]);
    }
  }
  for (int row = 0; row < R; ++row)
    for (int at = 0; at < P; ++at) store(scores + row * CHUNK + at * WIDTH, sums[row][at] * scale);
}

// Of `vectors` times WIDTH positions from vector `first` on; more, up to a whole group, are written.
template <int R, typename K>
void score_all(const FactorOf<K>* turned, int stride, const Places<K>& places, int first, int vectors, int block_size, int head_dim, float scale,
               float* scores) {
  constexpr int P = abreast(R);
  const int last = std::min(first + vectors, CHUNK / WIDTH);
  if (asks_ahead(R))
    for (int at = first; at < std::min(first + P, last); ++at)
      for (int d = 0; d < head_dim; d += 64 / (RUN * sizeof(K))) prefetch(places.keys[at] + d * block_size);
  int at = first;
  for (; at < last && at + P <= CHUNK / WIDTH; at += P)
    score<R, P>(turned, stride, places.keys + at, places.values + at * WIDTH / RUN, last - at - P, block_size, head_dim, scale, scores + at * WIDTH);
  for (; at < last; ++at)
    score<R, 1>(turned, stride, places.keys + at, places.values + at * WIDTH / RUN, last - at - 1, block_size, head_dim, scale, scores + at * WIDTH);
}

// Adds `count` positions' values, weighted, to R rows of sums [R, head_dim], N vectors of each from element d on; `values` says where each RUN of them lie.
template <int R, int N, typename K>
void add_values(const float* weights, const K* const* values, int count, int head_dim, int d, float* sums) {
  constexpr int AT_ONCE = Cached<K>::AT_ONCE;
  Vec totals[R][N];
  for (int row = 0; row < R; ++row)
    for (int at = 0; at < N; ++at) totals[row][at] = load(sums + row * head_dim + d + at * WIDTH);
  for (int start = 0; start < count; start += RUN) {
    const K* from = values[start / RUN] + d * AT_ONCE;
    for (int position = start; position < std::min(count, start + RUN); position += AT_ONCE, from += head_dim * AT_ONCE) {
      typename Cached<K>::Numbers value[N];
      for (int at = 0; at < N; ++at) value[at] = Cached<K>::read_values(from + at * WIDTH * AT_ONCE, count - position);
#pragma GCC unroll 12
      for (int row = 0; row < R; ++row)
        for (int at = 0; at < N; ++at) Cached<K>::add(totals[row][at], Cached<K>::weight(weights + row * CHUNK, position / AT_ONCE), value[at]);
    }
  }
  for (int row = 0; row < R; ++row)
    for (int at = 0; at < N; ++at) store(sums + row * head_dim + d + at * WIDTH, totals[row][at]);
}

template <int R, typename K>
void add_all_values(const float* weights, const K* const* values, int count, int head_dim, float* sums) {
  constexpr int N = abreast(R) == 2 ? 2 : 4;
  int d = 0;
  for (; d + N * WIDTH <= head_dim; d += N * WIDTH) add_values<R, N, K>(weights, values, count, head_dim, d, sums);
  for (; d + WIDTH <= head_dim; d += WIDTH) add_values<R, 1, K>(weights, values, count, head_dim, d, sums);
  for (; d < head_dim; ++d)
    for (int position = 0; position < count; ++position) {
      const float value = load_one(values[position / RUN] + value_at<K>(position % RUN, head_dim) + d * Cached<K>::AT_ONCE);
      for (int row = 0; row < R; ++row) sums[row * head_dim + d] += Cached<K>::one_weight(weights + row * CHUNK, position) * value;
    }
}

template <typename K>
struct Kernels {
  void (*score)(const FactorOf<K>*, int, const Places<K>&, int, int, int, int, float, float*);
  void (*add)(const float*, const K* const*, int, int, float*);
};

template <typename K, int... R>
const Kernels<K>& pick(int rows, std::integer_sequence<int, R...>) {
  static constexpr Kernels<K> all[] = {{score_all<R + 1, K>, add_all_values<R + 1, K>}...};
  return all[rows - 1];
}

template <typename K>
const Kernels<K>& kernels_of(int rows) {
  return pick<K>(rows, std::make_integer_sequence<int, ROWS_MAX>{});
}

// Turns the scores of one row's chunk into weights of its softmax so far. Returns what the earlier ones are to be multiplied by.
template <typename K>
float weigh(float* scores, int visible, int padded, float& most, float& total) {
  for (int at = std::max(0, visible); at < padded; ++at) scores[at] = NOWHERE;
  Vec best = broadcast(NOWHERE);
  bool is_nan = false;
  for (int at = 0; at < padded; at += WIDTH) {
    const Vec value = load(scores + at);
    is_nan |= has_nan(value);
    best = maximum(value, best);
  }
  float now = is_nan ? __builtin_nanf("") : largest(best);
  now = now > most || now != now ? now : most;
  if (now == NOWHERE) {
    std::fill(scores, scores + padded, 0.0f);
    return 1.0f;
  }
  Vec sums{};
  for (int at = 0; at < padded; at += WIDTH) {
    const Vec weight = exponential(load(scores + at) - now);
    Cached<K>::put_weights(scores, at, weight);
    sums += weight;
  }
  const float factor = most == now ? 1.0f : most == NOWHERE ? 0.0f : exponential(broadcast(most - now))[0];
  total = total * factor + sum(sums);
  most = now;
  return factor;
}

constexpr int up_to_runs(int positions) { return (positions + RUN - 1) / RUN * RUN; }

// Of each part the positions of a chunk that only it reads, and before them, as one more part, those that all read.
template <typename K>
void attend_tile(const Cache<K>& cache, int kv_head, const Tile& tile, float scale, float* memory) {
  constexpr int AT_ONCE = Cached<K>::AT_ONCE;
  const int rows = tile.count, head_dim = cache.head_dim, block_size = cache.block_size;
  float* scores = memory;                    // [rows, CHUNK]
  float* sums = scores + rows * CHUNK;       // [rows, head_dim]
  FactorOf<K>* turned = reinterpret_cast<FactorOf<K>*>(sums + rows * head_dim);  // [head_dim / AT_ONCE, rows]
  for (int row = 0; row < rows; ++row) Cached<K>::put_factors(tile.queries[row], head_dim, turned + row, rows);
  std::fill(sums, sums + rows * head_dim, 0.0f);
  float most[ROWS_MAX], total[ROWS_MAX] = {};
  std::fill(most, most + rows, NOWHERE);
  int end = 0;
  for (int at = 0; at < tile.parts; ++at) end = std::max(end, tile.part[at].end);
  for (int start = 0; start < end; start += CHUNK) {
    Places<K> shared, own[ROWS_MAX];
    const int common = std::clamp(tile.shared - start, 0, CHUNK);
    if (common) {
      shared.find(cache, kv_head, tile.part[0].table, start, 0, common);
      kernels_of<K>(rows).score(turned, rows, shared, 0, common / WIDTH, block_size, head_dim, scale, scores);
    }
    for (int at = 0; at < tile.parts; ++at) {
      const Part& part = tile.part[at];
      const int seen = std::clamp(part.end - start, 0, CHUNK), padded = up_to_runs(seen);
      if (padded > common) {
        own[at].find(cache, kv_head, part.table, start, common, padded);
        kernels_of<K>(part.count).score(turned + part.first, rows, own[at], common / WIDTH, (padded - common) / WIDTH, block_size, head_dim, scale,
                                        scores + part.first * CHUNK);
      }
      for (int row = part.first; row < part.first + part.count; ++row) {
        const float factor = weigh<K>(scores + row * CHUNK, tile.limits[row] - start, std::max(common, padded), most[row], total[row]);
        if (factor != 1.0f)
          for (int d = 0; d < head_dim; ++d) sums[row * head_dim + d] *= factor;
      }
    }
    if (common) kernels_of<K>(rows).add(scores, shared.values, common, head_dim, sums);
    for (int at = 0; at < tile.parts; ++at) {
      const Part& part = tile.part[at];
      const int seen = std::clamp(part.end - start, 0, CHUNK);
      if (seen > common)
        kernels_of<K>(part.count).add(scores + part.first * CHUNK + common / AT_ONCE, own[at].values + common / RUN, seen - common, head_dim,
                                      sums + part.first * head_dim);
    }
  }
  for (int row = 0; row < rows; ++row)
    for (int d = 0; d < head_dim; ++d) tile.outputs[row][d] = sums[row * head_dim + d] / total[row];
}

// Positions of whole blocks that two rows have in common.
int shared_by(const BatchView& batch, int block_size, int one, int other) {
  const int32_t *a = batch.table(one), *b = batch.table(other);
  const int blocks = std::min(batch.context_lens[one], batch.context_lens[other]) / block_size;
  return static_cast<int>(std::mismatch(a, a + blocks, b).first - a) * block_size;
}

// Element i with i + pairs; the rest stays.
void rotate(const float* from, const float* cos, const float* sin, int pairs, int head_dim, float* to) {
  int i = 0;
  for (; i + WIDTH <= pairs; i += WIDTH) {
    const Vec first = load(from + i), second = load(from + i + pairs), c = load(cos + i), s = load(sin + i);
    store(to + i, first * c - second * s);
    store(to + i + pairs, second * c + first * s);
  }
  for (; i < pairs; ++i) {
    const float first = from[i], second = from[i + pairs];
    to[i] = first * cos[i] - second * sin[i];
    to[i + pairs] = second * cos[i] + first * sin[i];
  }
  std::copy(from + 2 * pairs, from + head_dim, to + 2 * pairs);
}

}  // namespace

void Pieces::cut(const BatchView& batch, int heads, int kv_heads, int block_size) {
  const int group = heads / kv_heads, heads_of_piece = std::min(group, ROWS_MAX), tokens_of_piece = ROWS_MAX / heads_of_piece;
  pieces_.clear();
  for (int token = 0; token < batch.tokens;) {
    int row = batch.row_of(token);
    int end = std::min(batch.starts[row + 1], token + tokens_of_piece), shared = batch.context_lens[row];
    // Whoever begins with the same blocks may come along.
    while (end < batch.tokens && end < token + tokens_of_piece && end == batch.starts[row + 1]) {
      const int common = std::min(shared, shared_by(batch, block_size, row, row + 1));
      if (!common) break;
      shared = common;
      end = std::min(batch.starts[++row + 1], token + tokens_of_piece);
    }
    for (int kv_head = 0; kv_head < kv_heads; ++kv_head)
      for (int head = 0; head < group; head += heads_of_piece)
        pieces_.push_back({token, end - token, kv_head, kv_head * group + head, std::min(heads_of_piece, group - head), shared});
    token = end;
  }
}

template <typename K>
void rotate_and_store(Team& team, const Cache<K>& cache, const BatchView& batch, const float* qk, std::ptrdiff_t qk_stride, const float* value,
                      std::ptrdiff_t value_stride, const float* cos, const float* sin, int pairs, int heads, float* query) {
  constexpr int TOKENS = 8, AT_ONCE = Cached<K>::AT_ONCE;
  const int head_dim = cache.head_dim, kv_heads = cache.num_kv_heads, block_size = cache.block_size;
  team.run((batch.tokens + TOKENS - 1) / TOKENS, [&](int piece) {
    float rotated[HEAD_DIM_MAX + WIDTH];
    K converted[HEAD_DIM_MAX + WIDTH];
    for (int token = piece * TOKENS; token < std::min(batch.tokens, (piece + 1) * TOKENS); ++token) {
      const float *c = cos + std::ptrdiff_t{token} * pairs, *s = sin + std::ptrdiff_t{token} * pairs;
      const int64_t block = batch.slots[token] / block_size;
      const int offset = static_cast<int>(batch.slots[token] % block_size);
      for (int head = 0; head < heads + kv_heads; ++head) {
        const float* from = qk + token * qk_stride + std::ptrdiff_t{head} * head_dim;
        float* to = head < heads ? query + (std::ptrdiff_t{token} * heads + head) * head_dim : rotated;
        rotate(from, c, s, pairs, head_dim, to);
        if (head < heads) continue;
        const int kv_head = head - heads;
        K* keys = cache.keys + cache.at(block, kv_head) + key_at<K>(offset);
        for (int d = 0; d < head_dim; d += WIDTH) store(converted + d, load(rotated + d));
        for (int d = 0; d < head_dim; d += AT_ONCE, keys += block_size * AT_ONCE) std::copy(converted + d, converted + d + AT_ONCE, keys);
        const float* values_from = value + token * value_stride + std::ptrdiff_t{kv_head} * head_dim;
        K* values = cache.values + cache.at(block, kv_head) + value_at<K>(offset, head_dim);
        Cached<K>::put_values(values, values_from, head_dim);
      }
    }
  });
}

template <typename K>
void attend(Team& team, const Cache<K>& cache, const BatchView& batch, const Pieces& pieces, const float* query, int heads, float scale,
            float* output) {
  const int head_dim = cache.head_dim, count = pieces.count();
  // The last pieces of a prompt see the most, so they go first.
  team.run(count, [&](int at) {
    const Pieces::Piece& piece = pieces.at(count - 1 - at);
    static thread_local std::vector<float> memory;
    memory.resize(std::max(memory.size(), std::size_t(ROWS_MAX) * (2 * head_dim + CHUNK)));
    Tile tile;
    tile.shared = piece.shared;
    int row = batch.row_of(piece.token);
    for (int token = piece.token; token < piece.token + piece.tokens; ++token) {
      if (token == batch.starts[row + 1]) ++row;
      const int limit = batch.seen_by(row, token);
      if (token == piece.token || token == batch.starts[row]) tile.part[tile.parts++] = {tile.count, 0, 0, batch.table(row)};
      Part& part = tile.part[tile.parts - 1];
      part.count += piece.heads;
      part.end = limit;
      for (int head = piece.first_head; head < piece.first_head + piece.heads; ++head, ++tile.count) {
        const std::ptrdiff_t where = (std::ptrdiff_t{token} * heads + head) * head_dim;
        tile.limits[tile.count] = limit;
        tile.queries[tile.count] = query + where;
        tile.outputs[tile.count] = output + where;
      }
    }
    if (tile.parts == 1) tile.shared = 0;  // all is its own
    attend_tile(cache, piece.kv_head, tile, scale, memory.data());
  });
}

#define TESSERA_ATTENTION(K)                                                                                                                    \
  template void rotate_and_store<K>(Team&, const Cache<K>&, const BatchView&, const float*, std::ptrdiff_t, const float*, std::ptrdiff_t,       \
                                    const float*, const float*, int, int, float*);                                                      \
  template void attend<K>(Team&, const Cache<K>&, const BatchView&, const Pieces&, const float*, int, float, float*);
TESSERA_ATTENTION(float)
TESSERA_ATTENTION(Half)
#if defined(__AVX512BF16__)
TESSERA_ATTENTION(Brain)
#endif

}  // namespace tessera
