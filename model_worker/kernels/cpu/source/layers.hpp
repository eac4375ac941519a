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

// cos and sin, [tokens, pairs] each.
struct Angles {
  const float *cos, *sin;
  int pairs;
};

// Whose results are asked for: `count` of the batch's tokens, in any order, fewer than there are. Null: all.
struct Wanted {
  const int64_t* tokens;
  int count;
};

// Runs `count` layers over `hidden` [tokens, hidden size], in place. Of what the last one gives, that of the wanted tokens lies in the first rows, in their
// order, and nothing else is computed but everybody's keys and values.
void run_layers(Team& team, const Layer* layers, int count, const LayerShape& shape, const BatchView& batch, const Angles& angles, const Wanted& wanted,
                float* hidden);

}  // namespace tessera
