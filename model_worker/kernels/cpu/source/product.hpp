// Products with packed weights.
#pragma once

#include "inputs.hpp"
#include "team.hpp"

namespace tessera {

std::size_t bytes_of(Kind kind, int out, int in);

// Numbers [out, in], strides in elements.
struct Matrix {
  const float* data;
  int out, in;
  std::ptrdiff_t out_stride, in_stride;
};

// Fills `to.data`, of bytes_of(...) bytes. Returns whether the kind can keep these numbers; any plain one can.
bool pack(Team& team, const Matrix& from, const Weight& to);

// What becomes of a product: it takes the place of y, or is added to it.
enum class Into { PLACE, SUM };

// y [rows, out] = x @ weight.T + bias, rows `y_stride` elements apart. A row's bits depend on the row alone, whatever the others are.
void multiply(Team& team, const Inputs& x, const Weight& weight, float* y, std::ptrdiff_t y_stride, Into into = Into::PLACE);

// The same for weights whose outputs are gates, [0, out / 2), and what they are for: silu(gate) * that, as inputs of a product with weights of the same
// plain kind. out / 2 is a multiple of LINE.
void multiply_gated(Team& team, const Inputs& x, const Weight& weight, Inputs& to);

// Rows `ids` [count] of a weight into `to` [count, in].
void gather(Team& team, const Weight& weight, const int64_t* ids, int count, float* to);

}  // namespace tessera
