// Operations on each row of a batch by itself.
#pragma once

#include <cstddef>
#include <cstdint>

#include "simd.hpp"
#include "team.hpp"

namespace tessera {

// y = x / sqrt(mean(x ** 2) + eps) * weight, rows of `size`. With a `residual` [rows, size], what is normalised is `residual + x`, and goes to `total`; both
// may be null.
void rms_norm(Team& team, const float* x, const float* residual, float* total, const float* weight, float eps, float* y, int rows, int size);

// y [rows, n] = silu(x[:, :n]) * x[:, n:] of x [rows, 2 * n].
void silu_and_mul(Team& team, const float* x, float* y, int rows, int n);

}  // namespace tessera
