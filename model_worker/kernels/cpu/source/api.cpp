// What Python calls, see model_worker/kernels/cpu/library.py. Plain C: addresses and numbers.

#include "attention.hpp"
#include "eight_bits.hpp"
#include "layers.hpp"
#include "linear.hpp"
#include "rows.hpp"
#include "team.hpp"

using namespace tessera;

#define TESSERA_API extern "C" __attribute__((visibility("default")))

TESSERA_API const char* tessera_isa() { return ISA; }
TESSERA_API int tessera_panel() { return PANEL; }
TESSERA_API Team* tessera_team_new(int threads) { return new Team(threads); }
TESSERA_API void tessera_team_delete(Team* team) { delete team; }

TESSERA_API void tessera_rms_norm(Team* team, const float* x, const float* residual, float* total, const float* weight, float eps, float* y,
                                  int rows, int size) {
  rms_norm(*team, x, residual, total, weight, eps, y, rows, size);
}

TESSERA_API void tessera_silu_and_mul(Team* team, const float* x, float* y, int rows, int n) { silu_and_mul(*team, x, y, rows, n); }

TESSERA_API int tessera_group() { return GROUP; }

TESSERA_API void tessera_pack_i8(Team* team, const float* from, int64_t out_stride, int64_t in_stride, const EightBits* to) {
  pack(*team, from, out_stride, in_stride, *to);
}

TESSERA_API void tessera_multiply_i8(Team* team, const float* x, int64_t x_stride, const EightBits* weight, const float* bias, float* y, int rows) {
  multiply(*team, x, x_stride, *weight, bias, y, weight->out, rows);
}

TESSERA_API void tessera_gather_i8(Team* team, const EightBits* weight, const int64_t* ids, int count, float* to) {
  gather(*team, *weight, ids, count, to);
}

TESSERA_API void tessera_run_layers(Team* team, const Layer* layers, int count, const LayerShape* shape, const BatchView* batch, const float* cos,
                                    const float* sin, int pairs, float* hidden) {
  run_layers(*team, layers, count, *shape, *batch, cos, sin, pairs, hidden);
}

// One of each per type: of weights (W), and of what a cache holds (K).
#define TESSERA_OF(NAME, T)                                                                                                                     \
  TESSERA_API void tessera_pack_##NAME(Team* team, const float* from, int64_t out_stride, int64_t in_stride, int out, int in, T* to) {           \
    pack(*team, from, out_stride, in_stride, out, in, to);                                                                                      \
  }                                                                                                                                             \
  TESSERA_API void tessera_multiply_##NAME(Team* team, const float* x, int64_t x_stride, const T* weight, const float* bias, float* y, int rows, \
                                           int in, int out) {                                                                                   \
    multiply(*team, x, x_stride, weight, bias, y, out, rows, in, out);                                                                          \
  }                                                                                                                                             \
  TESSERA_API void tessera_gather_##NAME(Team* team, const T* weight, int in, const int64_t* ids, int count, float* to) {                       \
    gather(*team, weight, in, ids, count, to);                                                                                                  \
  }                                                                                                                                             \
  TESSERA_API void tessera_rotate_and_store_##NAME(Team* team, const Cache<T>* cache, const BatchView* batch, const float* qk,                  \
                                                   int64_t qk_stride, const float* value, int64_t value_stride, const float* cos,              \
                                                   const float* sin, int pairs, int heads, float* query) {                                      \
    rotate_and_store(*team, *cache, *batch, qk, qk_stride, value, value_stride, cos, sin, pairs, heads, query);                                 \
  }                                                                                                                                             \
  TESSERA_API void tessera_attend_##NAME(Team* team, const Cache<T>* cache, const BatchView* batch, const float* query, int heads, float scale, \
                                         float* output) {                                                                                      \
    attend(*team, *cache, *batch, query, heads, scale, output);                                                                                 \
  }

TESSERA_OF(f32, float)
TESSERA_OF(f16, Half)
