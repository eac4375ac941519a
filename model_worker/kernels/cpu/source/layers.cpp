#include "layers.hpp"

#include <algorithm>
#include <vector>

#include "eight_bits.hpp"
#include "linear.hpp"
#include "rows.hpp"

namespace tessera {

namespace {

void product(Team& team, const Weight& weight, const float* x, float* y, int rows) {
  switch (weight.kind) {
    case Kind::F32:
      return multiply(team, x, weight.in, static_cast<const float*>(weight.data), weight.bias, y, weight.out, rows, weight.in, weight.out);
    case Kind::F16:
      return multiply(team, x, weight.in, static_cast<const Half*>(weight.data), weight.bias, y, weight.out, rows, weight.in, weight.out);
    case Kind::I8:
      return multiply(team, x, weight.in, EightBits{static_cast<uint8_t*>(weight.data), weight.scales, weight.out, weight.in}, weight.bias, y,
                      weight.out, rows);
  }
}

// What the layers of one pass write one after the other; kept for the next pass.
struct Scratch {
  std::vector<float> normed, heads, query, mixed, added, gates, inner;

  void fit(const Layer& layer, const LayerShape& shape, int tokens) {
    const std::size_t rows = tokens, hidden = layer.output.out;
    const auto grow = [](std::vector<float>& memory, std::size_t size) { memory.resize(std::max(memory.size(), size)); };
    grow(normed, rows * hidden);
    grow(added, rows * hidden);
    grow(heads, rows * layer.qkv.out);
    grow(query, rows * shape.heads * shape.head_dim);
    grow(mixed, rows * shape.heads * shape.head_dim);
    grow(gates, rows * layer.gate_up.out);
    grow(inner, rows * layer.down.in);
  }
};

template <typename K>
void attention(Team& team, const Layer& layer, const LayerShape& shape, const BatchView& batch, const float* cos, const float* sin, int pairs,
               Scratch& scratch) {
  const Cache<K> cache{static_cast<K*>(layer.keys), static_cast<K*>(layer.values), shape.kv_heads, shape.block_size, shape.head_dim};
  const std::ptrdiff_t stride = layer.qkv.out;
  float* heads = scratch.heads.data();
  const float* values = heads + (shape.heads + shape.kv_heads) * shape.head_dim;
  rotate_and_store(team, cache, batch, heads, stride, values, stride, cos, sin, pairs, shape.heads, scratch.query.data());
  attend(team, cache, batch, scratch.query.data(), shape.heads, shape.scale, scratch.mixed.data());
}

}  // namespace

void run_layers(Team& team, const Layer* layers, int count, const LayerShape& shape, const BatchView& batch, const float* cos, const float* sin,
                int pairs, float* hidden) {
  static thread_local Scratch scratch;
  const int tokens = batch.tokens, size = layers[0].output.out;
  const float* pending = nullptr;  // to be added to the hidden states
  for (int index = 0; index < count; ++index) {
    const Layer& layer = layers[index];
    scratch.fit(layer, shape, tokens);
    float* normed = scratch.normed.data();
    rms_norm(team, pending ? pending : hidden, pending ? hidden : nullptr, hidden, layer.input_norm, shape.eps, normed, tokens, size);
    product(team, layer.qkv, normed, scratch.heads.data(), tokens);
    float* heads = scratch.heads.data();
    if (layer.query_norm) norm_heads(team, heads, layer.qkv.out, layer.query_norm, shape.eps, tokens, shape.heads, shape.head_dim);
    if (layer.key_norm)
      norm_heads(team, heads + shape.heads * shape.head_dim, layer.qkv.out, layer.key_norm, shape.eps, tokens, shape.kv_heads, shape.head_dim);
    if (shape.cache_kind == Kind::F16)
      attention<Half>(team, layer, shape, batch, cos, sin, pairs, scratch);
    else
      attention<float>(team, layer, shape, batch, cos, sin, pairs, scratch);
    product(team, layer.output, scratch.mixed.data(), scratch.added.data(), tokens);
    rms_norm(team, scratch.added.data(), hidden, hidden, layer.post_norm, shape.eps, normed, tokens, size);
    product(team, layer.gate_up, normed, scratch.gates.data(), tokens);
    silu_and_mul(team, scratch.gates.data(), scratch.inner.data(), tokens, layer.down.in);
    product(team, layer.down, scratch.inner.data(), scratch.added.data(), tokens);
    pending = scratch.added.data();
  }
  for (std::ptrdiff_t at = 0; at < std::ptrdiff_t{tokens} * size; ++at) hidden[at] += pending[at];
}

}  // namespace tessera
