// From the number of a kind of weights to the kind.
#pragma once

#include "compact.hpp"

namespace tessera {

#if defined(__AVX512BF16__)
using Brains = BrainsByBrains;
#else
using Brains = ByFloats<Brain>;
#endif

// Calls `work` with the kind.
template <typename Work>
auto with_kind(Kind kind, const Work& work) {
  switch (kind) {
    case Kind::F32: return work(ByFloats<float>{});
    case Kind::F16: return work(ByFloats<Half>{});
    case Kind::BF16: return work(Brains{});
    case Kind::I8: return work(BytesByBytes{});
    case Kind::F32_IN_12: return work(Compact<ByFloats<float>, 1>{});
    case Kind::F32_IN_20: return work(Compact<ByFloats<float>, 2>{});
    case Kind::BF16_IN_12: return work(Compact<Brains, 1>{});
  }
  __builtin_unreachable();
}

// That whose lines come out of those of `kind`, and whose inputs it takes.
inline Kind plain_of(Kind kind) {
  switch (kind) {
    case Kind::F32_IN_12:
    case Kind::F32_IN_20: return Kind::F32;
    case Kind::BF16_IN_12: return Kind::BF16;
    default: return kind;
  }
}

// Calls `work` with the plain kind.
template <typename Work>
auto with_plain(Kind kind, const Work& work) {
  switch (plain_of(kind)) {
    case Kind::F16: return work(ByFloats<Half>{});
    case Kind::BF16: return work(Brains{});
    case Kind::I8: return work(BytesByBytes{});
    default: return work(ByFloats<float>{});
  }
}

}  // namespace tessera
