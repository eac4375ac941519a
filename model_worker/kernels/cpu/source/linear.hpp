// Products with weights that were packed for them.
#pragma once

#include <cstddef>

#include "simd.hpp"
#include "team.hpp"

namespace tessera {

// Columns of a panel: two vectors of sums per row.
constexpr int PANEL = 2 * WIDTH;

// A weight [out, in] lies as panels of PANEL outputs, each [in, PANEL], the last one filled up with zeros.
inline int panels_of(int out) { return (out + PANEL - 1) / PANEL; }

// `from` [out, in] with strides in elements; `to` has panels_of(out) * in * PANEL elements.
template <typename W>
void pack(Team& team, const float* from, std::ptrdiff_t out_stride, std::ptrdiff_t in_stride, int out, int in, W* to);

// y [rows, out] = x [rows, in] @ weight.T (+ bias [out]), each sum in the order of `in`, whatever the other rows: a row's bits depend on the row
// alone. Rows of x and y are `x_stride` and `y_stride` elements apart. bias may be null. 
template <typename W>
void multiply(Team& team, const float* x, std::ptrdiff_t x_stride, const W* weight, const float* bias, float* y, std::ptrdiff_t y_stride, int rows,
              int in, int out);

// Rows `ids` [count] of a packed weight [out, in] into `to` [count, in].
template <typename W>
void gather(Team& team, const W* weight, int in, const int64_t* ids, int count, float* to);

}  // namespace tessera
