#include "layers.hpp"

#include <algorithm>
#include <vector>

#include "picked.hpp"
#include "product.hpp"
#include "rows.hpp"

namespace tessera {

namespace {

// What the layers of one pass write one after the other; kept for the next pass.
struct Scratch {
  std::vector<float> heads, query, mixed, gates;
  Inputs inputs, inner;
  Pieces pieces;

  void fit(const Layer& layer, const LayerShape& shape, int tokens) {
    const std::size_t rows = tokens;
    const auto grow = [](std::vector<float>& memory, std::size_t size) { memory.resize(std::max(memory.size(), size)); };
    grow(heads, rows * layer.qkv.out);
    grow(query, rows * shape.heads * shape.head_dim);
    grow(mixed, rows * shape.heads * shape.head_dim);
  }
};

// One pass over the layers: who works, on what, and where.
struct Pass {
  Team& team;
  const LayerShape& shape;
  const BatchView& batch;
  Angles angles;
  Scratch& scratch;

  // The normalised rows of `hidden` [tokens, size] become inputs.
  void norm_into(const float* hidden, int size, const float* norm, Kind kind) {
    Inputs& inputs = scratch.inputs;
    inputs.fit(kind, batch.tokens, size);
    by_rows(team, batch.tokens, size, [&](int row) {
      float* normed = row_memory(size);
      normalise(hidden + std::ptrdiff_t{row} * size, norm, shape.eps, normed, size);
      inputs.put(row, normed);
    });
  }

  void norm_and_multiply(const float* hidden, int size, const float* norm, const Weight& weight, float* y) {
    norm_into(hidden, size, norm, weight.kind);
    multiply(team, scratch.inputs, weight, y, weight.out);
  }

  // What the last product of a layer takes.
  const Inputs& gated(const Layer& layer, const float* hidden) {
    const int size = layer.gate_up.in, inner_size = layer.down.in;
    Inputs& inner = scratch.inner;
    inner.fit(layer.down.kind, batch.tokens, inner_size);
    if (plain_of(layer.gate_up.kind) == plain_of(layer.down.kind) && inner_size % LINE == 0) {
      norm_into(hidden, size, layer.post_norm, layer.gate_up.kind);
      multiply_gated(team, scratch.inputs, layer.gate_up, inner);
      return inner;
    }
    scratch.gates.resize(std::max(scratch.gates.size(), std::size_t(batch.tokens) * layer.gate_up.out));
    norm_and_multiply(hidden, size, layer.post_norm, layer.gate_up, scratch.gates.data());
    by_rows(team, batch.tokens, 2 * inner_size, [&](int row) {
      float* values = row_memory(inner_size);
      silu_and_mul(scratch.gates.data() + std::ptrdiff_t{row} * 2 * inner_size, values, inner_size);
      inner.put(row, values);
    });
    return inner;
  }

  void norm_heads(const float* weight, float* heads, int count, std::ptrdiff_t stride) {
    if (!weight) return;
    by_rows(team, batch.tokens, count * shape.head_dim, [&](int row) {
      for (int head = 0; head < count; ++head) {
        float* at = heads + row * stride + std::ptrdiff_t{head} * shape.head_dim;
        normalise(at, weight, shape.eps, at, shape.head_dim);
      }
    });
  }

  // Calls `use(cache)` with what the pool keeps of a layer.
  template <typename Use>
  void with_cache(const Layer& layer, const Use& use) {
    const auto of = [&]<typename K>(K) {
      use(Cache<K>{static_cast<K*>(layer.keys), static_cast<K*>(layer.values), shape.kv_heads, shape.block_size, shape.head_dim});
    };
    switch (shape.cache_kind) {
#if defined(__AVX512BF16__)
      case Kind::BF16: of(Brain{}); break;
#endif
      case Kind::F16: of(Half{}); break;
      default: of(float{});
    }
  }

  // Keys and values go to the pool, queries to `scratch.query`.
  void look(const Layer& layer, const float* hidden) {
    const std::ptrdiff_t stride = layer.qkv.out;
    scratch.fit(layer, shape, batch.tokens);
    float* heads = scratch.heads.data();
    norm_and_multiply(hidden, layer.output.out, layer.input_norm, layer.qkv, heads);
    norm_heads(layer.query_norm, heads, shape.heads, stride);
    norm_heads(layer.key_norm, heads + shape.heads * shape.head_dim, shape.kv_heads, stride);
    const float* values = heads + (shape.heads + shape.kv_heads) * shape.head_dim;
    with_cache(layer, [&](const auto& cache) {
      rotate_and_store(team, cache, batch, heads, stride, values, stride, angles.cos, angles.sin, angles.pairs, shape.heads, scratch.query.data());
    });
  }

  // All that comes of the queries is added to `hidden`.
  void add(const Layer& layer, const float* query, float* hidden) {
    const int size = layer.output.out, mixed_size = layer.output.in;
    Inputs& inputs = scratch.inputs;
    float* mixed = scratch.mixed.data();
    with_cache(layer, [&](const auto& cache) { attend(team, cache, batch, scratch.pieces, query, shape.heads, shape.scale, mixed); });
    inputs.fit(layer.output.kind, batch.tokens, mixed_size);
    by_rows(team, batch.tokens, mixed_size, [&](int row) { inputs.put(row, mixed + std::ptrdiff_t{row} * mixed_size); });
    multiply(team, inputs, layer.output, hidden, size, Into::SUM);
    multiply(team, gated(layer, hidden), layer.down, hidden, size, Into::SUM);
  }
};

}  // namespace

void run_layers(Team& team, const Layer* layers, int count, const LayerShape& shape, const BatchView& batch, const Angles& angles, const Wanted& wanted,
                float* hidden) {
  static thread_local Scratch scratch;
  const auto cut = [&](const BatchView& rows) { scratch.pieces.cut(rows, shape.heads, shape.kv_heads, shape.block_size); };
  cut(batch);
  Pass pass{team, shape, batch, angles, scratch};
  const int whole = wanted.tokens ? count - 1 : count;
  for (int index = 0; index < whole; ++index) {
    pass.look(layers[index], hidden);
    pass.add(layers[index], scratch.query.data(), hidden);
  }
  if (whole == count) return;
  const Layer& last = layers[whole];
  pass.look(last, hidden);
  const Picked picked(batch, wanted.tokens, wanted.count);
  const std::vector<float> query = picked.rows(scratch.query.data(), shape.heads * shape.head_dim);
  std::vector<float> rows = picked.rows(hidden, last.output.out);
  cut(picked.view());
  Pass{team, shape, picked.view(), angles, scratch}.add(last, query.data(), rows.data());
  std::copy(rows.begin(), rows.end(), hidden);
}

}  // namespace tessera
