// Whole decoder layers, one after the other: what a call from Python costs is paid once for all of them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention.hpp"
#include "team.hpp"
#include "weight.hpp"

namespace tessera {

// Norm, attention, norm, SwiGLU, each pair's result added to the hidden states. `query_norm` and `key_norm` [head_dim], for heads before they are rotated,
// may be null. What the cache holds says `LayerShape::cache_kind`.
struct Layer {
  const float* input_norm;
  Weight qkv, output;
  const float* query_norm;
  const float* key_norm;
  const float* post_norm;
  Weight gate_up, down;
  void* keys;
  void* values;
};

struct LayerShape {
  Kind cache_kind;
  int32_t heads, kv_heads, head_dim, block_size;
  float eps, scale;  // of norms; of scores
};

// Runs `count` layers over `hidden` [tokens, hidden size], in place. cos and sin: [tokens, pairs].
void run_layers(Team& team, const Layer* layers, int count, const LayerShape& shape, const BatchView& batch, const float* cos, const float* sin,
                int pairs, float* hidden);

}  // namespace tessera
