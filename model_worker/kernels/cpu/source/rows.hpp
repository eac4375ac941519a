// Operations on each row of a batch by itself.
#pragma once

#include <cstddef>
#include <cstdint>

#include "simd.hpp"
#include "team.hpp"

namespace tessera {

// y = x / sqrt(mean(x ** 2) + eps) * weight, rows of `size`. With a `residual` [rows, size], what is normalised is `residual + x`, and goes to `total`, which
// may be the residual; both may be null.
void rms_norm(Team& team, const float* x, const float* residual, float* total, const float* weight, float eps, float* y, int rows, int size);

// The same for heads of `size` elements in place: `heads` of them side by side in each of `rows` rows that are `stride` elements apart.
void norm_heads(Team& team, float* x, std::ptrdiff_t stride, const float* weight, float eps, int rows, int heads, int size);

// y [rows, n] = silu(x[:, :n]) * x[:, n:] of x [rows, 2 * n].
void silu_and_mul(Team& team, const float* x, float* y, int rows, int n);

}  // namespace tessera
