// Products in 8 bits: weights quantized once, inputs row by row as they come, both by groups of GROUP numbers with a scale each.
#pragma once

#include <cstddef>
#include <cstdint>

#include "linear.hpp"
#include "team.hpp"

namespace tessera {

constexpr int GROUP = 32;

inline int groups_of(int in) { return (in + GROUP - 1) / GROUP; }

// A weight [out, in], in panels of PANEL outputs: `values` of each [groups, GROUP / 4, PANEL, 4], a number v as v + 128, and `scales` [groups, PANEL], the
// input filled up with zeros to whole groups. Each number stands for itself times its scale.
struct EightBits {
  uint8_t* values;
  float* scales;
  int out, in;
};

// See `linear.hpp`. Quantizes to the nearest of -127 to 127 times the group's largest magnitude over 127.
void pack(Team& team, const float* from, std::ptrdiff_t out_stride, std::ptrdiff_t in_stride, const EightBits& to);
void multiply(Team& team, const float* x, std::ptrdiff_t x_stride, const EightBits& weight, const float* bias, float* y, std::ptrdiff_t y_stride,
              int rows);
void gather(Team& team, const EightBits& weight, const int64_t* ids, int count, float* to);

}  // namespace tessera
