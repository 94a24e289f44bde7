// Logits and gradients of any dtype, read into and written from the dtype they are computed in.
#pragma once

#include <cstdint>
#include <cstring>

namespace {

inline float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline uint32_t to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

struct BFloat16 {
  uint16_t bits;
  operator float() const { return from_bits(uint32_t{bits} << 16); }
  static BFloat16 from(float value) {  // to nearest, ties to even
    const uint32_t b = to_bits(value);
    const uint32_t rounded = (b + 0x7fffu + ((b >> 16) & 1u)) >> 16;
    return {static_cast<uint16_t>(value != value ? 0x7fc0u : rounded)};
  }
};

struct Half {
  uint16_t bits;
  operator float() const {
    const uint32_t sign = (uint32_t{bits} & 0x8000u) << 16, rest = uint32_t{bits} & 0x7fffu;
    const float scaled = from_bits(rest << 13) * 0x1p112f;  // right for subnormal numbers, too
    return from_bits((rest >= 0x7c00u ? (rest << 13) | 0x7f800000u : to_bits(scaled)) | sign);
  }
  static Half from(float value) {  // to nearest, ties to even
    const uint32_t b = to_bits(value), sign = (b >> 16) & 0x8000u, rest = b & 0x7fffffffu;
    const uint32_t normal = (rest - 0x38000000u + 0xfffu + ((rest >> 13) & 1u)) >> 13;
    const uint32_t subnormal = to_bits(from_bits(rest) + 0.5f) - 0x3f000000u;  // the addition rounds at 2^-24
    const uint32_t finite = rest < 0x38800000u ? subnormal : normal;
    const uint32_t infinite = rest > 0x7f800000u ? 0x7e00u : 0x7c00u;
    return {static_cast<uint16_t>((rest >= 0x477ff000u ? infinite : finite) | sign)};
  }
};

template <class To, class From>
inline To convert(From value) {
  return static_cast<To>(value);
}
template <>
inline BFloat16 convert(float value) {
  return BFloat16::from(value);
}
template <>
inline Half convert(float value) {
  return Half::from(value);
}
template <>
inline BFloat16 convert(double value) {
  return BFloat16::from(static_cast<float>(value));
}
template <>
inline Half convert(double value) {
  return Half::from(static_cast<float>(value));
}

template <class To, class From>
void copy(const void* from, void* to, int64_t first, int64_t count, int64_t to_first) {
  const From* __restrict__ source = static_cast<const From*>(from) + first;
  To* __restrict__ target = static_cast<To*>(to) + to_first;
  for (int64_t j = 0; j < count; ++j) target[j] = convert<To>(source[j]);
}

// (from, to, first element of from, count, first element of to)
using Copy = void (*)(const void*, void*, int64_t, int64_t, int64_t);
enum Dtype : int32_t { kFloat32, kBFloat16, kFloat16, kFloat64 };  // as in rows_compiled.py

template <class T>
Copy reader(int32_t dtype) {
  switch (dtype) {
    case kBFloat16: return copy<T, BFloat16>;
    case kFloat16: return copy<T, Half>;
    case kFloat64: return copy<T, double>;
    default: return copy<T, float>;
  }
}

template <class T>
Copy writer(int32_t dtype) {
  switch (dtype) {
    case kBFloat16: return copy<BFloat16, T>;
    case kFloat16: return copy<Half, T>;
    case kFloat64: return copy<double, T>;
    default: return copy<float, T>;
  }
}

}  // namespace
