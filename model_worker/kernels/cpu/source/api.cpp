// What Python calls, see model_worker/kernels/cpu/library.py. Plain C: addresses and numbers.

#include "attention.hpp"
#include "layers.hpp"
#include "product.hpp"
#include "rows.hpp"
#include "team.hpp"

using namespace tessera;

#define TESSERA_API extern "C" __attribute__((visibility("default")))

TESSERA_API const char* tessera_isa() { return ISA; }
TESSERA_API Team* tessera_team_new(int threads) { return new Team(threads); }
TESSERA_API void tessera_team_delete(Team* team) { delete team; }

TESSERA_API int64_t tessera_weight_bytes(int kind, int out, int in) { return static_cast<int64_t>(bytes_of(static_cast<Kind>(kind), out, in)); }

TESSERA_API int tessera_pack(Team* team, const Matrix* from, const Weight* to) { return pack(*team, *from, *to); }

TESSERA_API void tessera_gather(Team* team, const Weight* weight, const int64_t* ids, int count, float* to) {
  gather(*team, *weight, ids, count, to);
}

// y [rows, out] = x [rows, in] @ weight.T + bias, rows of x `x_stride` elements apart.
TESSERA_API void tessera_multiply(Team* team, const Weight* weight, const float* x, int64_t x_stride, int rows, float* y) {
  static thread_local Inputs inputs;
  inputs.fit(weight->kind, rows, weight->in);
  Inputs& to = inputs;  // of this thread, whoever fills it
  by_rows(*team, rows, weight->in, [&](int row) { to.put(row, x + row * x_stride); });
  multiply(*team, inputs, *weight, y, weight->out);
}

// y [rows, size], see `normalise`. With a `residual` [rows, size], what is normalised is `residual + x`, and goes to `total`; both may be null.
TESSERA_API void tessera_rms_norm(Team* team, const float* x, const float* residual, float* total, const float* weight, float eps, float* y,
                                  int rows, int size) {
  by_rows(*team, rows, size, [&](int row) {
    const std::ptrdiff_t first = std::ptrdiff_t{row} * size;
    const float* from = x + first;
    if (residual) {
      for (int at = 0; at < size; ++at) total[first + at] = residual[first + at] + from[at];
      from = total + first;
    }
    normalise(from, weight, eps, y + first, size);
  });
}

TESSERA_API void tessera_silu_and_mul(Team* team, const float* x, float* y, int rows, int n) {
  by_rows(*team, rows, 2 * n, [&](int row) { silu_and_mul(x + std::ptrdiff_t{row} * 2 * n, y + std::ptrdiff_t{row} * n, n); });
}

TESSERA_API void tessera_run_layers(Team* team, const Layer* layers, int count, const LayerShape* shape, const BatchView* batch, const Angles* angles,
                                    const Wanted* wanted, float* hidden) {
  run_layers(*team, layers, count, *shape, *batch, *angles, *wanted, hidden);
}

// One of each per type of what a cache holds.
#define TESSERA_OF(NAME, T)                                                                                                                     \
  TESSERA_API void tessera_rotate_and_store_##NAME(Team* team, const Cache<T>* cache, const BatchView* batch, const float* qk,                  \
                                                   int64_t qk_stride, const float* value, int64_t value_stride, const float* cos,              \
                                                   const float* sin, int pairs, int heads, float* query) {                                      \
    rotate_and_store(*team, *cache, *batch, qk, qk_stride, value, value_stride, cos, sin, pairs, heads, query);                                 \
  }                                                                                                                                             \
  TESSERA_API void tessera_attend_##NAME(Team* team, const Cache<T>* cache, const BatchView* batch, const float* query, int heads, float scale, \
                                         float* output) {                                                                                      \
    Pieces pieces;                                                                                                                              \
    pieces.cut(*batch, heads, cache->num_kv_heads, cache->block_size);                                                                          \
    attend(*team, *cache, *batch, pieces, query, heads, scale, output);                                                                         \
  }

TESSERA_OF(f32, float)
TESSERA_OF(f16, Half)
#if defined(__AVX512BF16__)
TESSERA_OF(bf16, Brain)
#endif
