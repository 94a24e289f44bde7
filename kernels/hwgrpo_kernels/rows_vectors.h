// Vectors of fp32 and fp64 as wide as the processor's, and e^x and tanh of them.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

#if defined(__AVX512F__)
constexpr int64_t kVectorBytes = 64;
#elif defined(__AVX__)
constexpr int64_t kVectorBytes = 32;
#else
constexpr int64_t kVectorBytes = 16;
#endif

template <class T>
struct Vectors;
template <>
struct Vectors<float> {
  typedef float Real __attribute__((vector_size(kVectorBytes)));
  typedef int32_t Int __attribute__((vector_size(kVectorBytes)));
};
template <>
struct Vectors<double> {
  typedef double Real __attribute__((vector_size(kVectorBytes)));
  typedef int64_t Int __attribute__((vector_size(kVectorBytes)));
};
template <class T>
using Real = typename Vectors<T>::Real;
template <class T>
using Int = typename Vectors<T>::Int;
template <class T>
constexpr int64_t kLanes = kVectorBytes / static_cast<int64_t>(sizeof(T));

template <class T>
inline Real<T> splat(T value) {
  return Real<T>{} + value;
}

template <class T>
inline Real<T> load(const T* from) {
  Real<T> value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

template <class T>
inline void store(T* to, Real<T> value) {
  std::memcpy(to, &value, sizeof(value));
}

template <class T>
inline T sum_of(Real<T> value) {
  T sum = 0;
  for (int64_t lane = 0; lane < kLanes<T>; ++lane) sum += value[lane];
  return sum;
}

template <class T>
struct Limits;
template <>
struct Limits<float> {
  static constexpr float kFloor = -104.f;     // exp of it is 0; a distance of -inf becomes it, so that 0 * d is 0
  static constexpr float kSmallest = -87.3f;  // below it exp is not a normal number, and taken as 0
  static constexpr float kRound = 12582912.f + 127.f;  // 1.5 * 2^23 + exponent bias: adding it rounds to an integer
  static constexpr int kMantissa = 23;
};
template <>
struct Limits<double> {
  static constexpr double kFloor = -750.;
  static constexpr double kSmallest = -708.3;
  static constexpr double kRound = 6755399441055744. + 1023.;
  static constexpr int kMantissa = 52;
};

// (e^r - 1) / r for |r| <= ln(2)/2. In fp32 of least relative error of e^r, 1e-7; in fp64 Taylor's, 4e-18.
inline Real<float> exp_slope(Real<float> r) {
  Real<float> p = splat(0.0082894582f);
  p = p * r + 0.041902557f;
  p = p * r + 0.16667676f;
  p = p * r + 0.49999115f;
  return p * r + 0.9999997f;
}

inline Real<double> exp_slope(Real<double> r) {
  Real<double> p = splat(1.0 / 87178291200);
  double factorial = 6227020800;  // 13!
  for (int k = 13; k >= 1; --k) {
    p = p * r + 1 / factorial;
    factorial /= k;
  }
  return p;
}

// e^x for x <= 0 (a rounding error above is as good), 0 below kSmallest. NaN stays NaN.
template <class T>
inline Real<T> exp_of(Real<T> x) {
  constexpr T kLog2e = T(1.4426950408889634), kLn2High = T(0.693145751953125), kLn2Low = T(1.42860682030941723e-6);
  const Real<T> rounded = x * kLog2e + Limits<T>::kRound;
  const Real<T> n = rounded - Limits<T>::kRound;
  const Real<T> r = (x - n * kLn2High) - n * kLn2Low;
  const Real<T> power = (Real<T>)((Int<T>)rounded << Limits<T>::kMantissa);  // 2^n: the bias is in `rounded`
  const Real<T> value = (exp_slope(r) * r + T(1)) * power;
  return x < Limits<T>::kSmallest ? Real<T>{} : value;
}

inline void squash_block(double* u, int64_t count, double squash) {
  for (int64_t j = 0; j < count; ++j) u[j] = std::tanh(u[j] * squash);
}

inline void squash_block(float* u, int64_t count, float squash) {
  for (int64_t j = 0; j < count; j += kLanes<float>) {
    const Real<float> x = load(u + j) * squash, size = x < 0.f ? -x : x, square = x * x;
    const Real<float> e = exp_of<float>(-2.f * size), large = (1.f - e) / (1.f + e);
    Real<float> p = splat(-0.005704987f);  // tanh(x) / x - 1 in x^2, relative error 4e-9 up to 0.625
    p = p * square + 0.02063909f;
    p = p * square - 0.053739715f;
    p = p * square + 0.13331442f;
    p = p * square - 0.3333328f;
    const Real<float> small = x + x * square * p;
    store(u + j, size < 0.625f ? small : (x < 0.f ? -large : large));
  }
}

}  // namespace
