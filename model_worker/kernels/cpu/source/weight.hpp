// A weight that was packed for products, and how a product is cut.
#pragma once

#include <cstddef>
#include <cstdint>

#include "simd.hpp"

namespace tessera {

// The later ones are those before them, without bits that say nothing (see `compact.hpp`).
enum class Kind : int32_t { F32, F16, BF16, I8, F32_IN_12, F32_IN_20, BF16_IN_12 };

// Columns of a panel: two vectors of sums per row.
constexpr int PANEL = 2 * WIDTH;

// Inputs that belong together, in weights and in what they are multiplied by; of 8 bits, those that share a scale.
constexpr int LINE = 32;

constexpr int CACHE_LINE = 64;  // bytes

inline int panels_of(int out) { return (out + PANEL - 1) / PANEL; }
inline int lines_of(int in) { return (in + LINE - 1) / LINE; }

// [out, in] as panels of PANEL outputs, each of which lies in one piece, line after line, filled up with zeros; what a line looks like is its
// kind's (see `kinds.hpp`). `bias` [out] may be null.
struct Weight {
  Kind kind;
  int32_t out, in;
  std::byte* data;
  const float* bias;
};

}  // namespace tessera
