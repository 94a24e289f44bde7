// row_stats and row_grad for a CPU: an op reads each row once, a block of columns at a time that stays in the
// first-level cache. Formulas and the meaning of every argument: definitions.py. Called from rows_compiled.py.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <system_error>
#include <thread>
#include <vector>

#include "rows_dtypes.h"
#include "rows_vectors.h"

namespace {

constexpr int64_t kBlock = 1024;  // columns: fp32 took least time with it, of 512 to 4096
constexpr int64_t kUnroll = 4;    // vectors at a time, which hides the latency of a running maximum
constexpr int64_t kLogitsPerThread = int64_t{1} << 16;  // below it, starting a thread is not worth it

// One block of a row in the accumulating dtype, after the softcap's tanh; padded with -inf to whole vectors.
template <class T>
struct Block {
  alignas(64) T u[kBlock] = {};
  int64_t first = 0, count = 0, padded = 0;

  void fill(Copy read, const void* logits, int64_t row_start, int64_t column, int64_t vocab, T squash) {
    constexpr int64_t kStep = kUnroll * kLanes<T>;
    first = column;
    count = std::min(kBlock, vocab - column);
    padded = (count + kStep - 1) / kStep * kStep;
    read(logits, u, row_start + column, count, 0);
    if (squash != 0) squash_block(u, padded, squash);
    std::fill(u + count, u + padded, -std::numeric_limits<T>::infinity());
  }

  bool holds(int64_t column) const { return column >= first && column < first + count; }

  // Passes over NaN, which the sum of exponentials shows.
  T max() const {
    Real<T> best[kUnroll];
    for (auto& each : best) each = splat(-std::numeric_limits<T>::infinity());
    for (int64_t j = 0; j < padded; j += kUnroll * kLanes<T>) {
      for (int64_t k = 0; k < kUnroll; ++k) {
        const Real<T> value = load(u + j + k * kLanes<T>);
        best[k] = value > best[k] ? value : best[k];
      }
    }
    T found = best[0][0];
    for (const auto& each : best) {
      for (int64_t lane = 0; lane < kLanes<T>; ++lane) found = std::max(found, each[lane]);
    }
    return found;
  }

  // factor * (u - centre), and never below kFloor.
  Real<T> distance(int64_t j, T centre, T factor) const {
    const Real<T> d = (load(u + j) - centre) * factor;
    return d < Limits<T>::kFloor ? splat(Limits<T>::kFloor) : d;
  }
};

// A running sum of e^d and of d e^d over the blocks of a row, d = factor * (u - row_max so far).
template <class T, bool kEntropy>
struct Sums {
  double exps = 0, weighted = 0;
  T row_max = std::numeric_limits<T>::lowest();

  void add(const Block<T>& block, T block_max, T factor) {
    if (block_max > row_max) {
      const double shift = std::max<double>((row_max - block_max) * factor, Limits<T>::kFloor);
      const double shrink = std::exp(shift);
      weighted = shrink * (weighted + shift * exps);
      exps *= shrink;
      row_max = block_max;
    }
    Real<T> sum[kUnroll] = {}, products[kUnroll] = {};
    for (int64_t j = 0; j < block.padded; j += kUnroll * kLanes<T>) {
      for (int64_t k = 0; k < kUnroll; ++k) {
        const Real<T> d = block.distance(j + k * kLanes<T>, row_max, factor), e = exp_of<T>(d);
        sum[k] += e;
        if (kEntropy) products[k] += d * e;
      }
    }
    for (int64_t k = 0; k < kUnroll; ++k) {
      exps += sum_of<T>(sum[k]);
      if (kEntropy) weighted += sum_of<T>(products[k]);
    }
  }
};

template <class T>
struct StatsCall {
  const void* logits;
  int64_t vocab, stride;
  const int64_t* targets;
  double scale, squash;
  const T* row_scale;
  T *logprob, *entropy, *row_max, *log_sum;
  Copy read;

  // The target is kept out of the sum: ln sum = log1p(others + expm1(d_y)) loses no digit when p_y -> 1.
  template <bool kEntropy>
  void row(int64_t i, Block<T>& block) const {
    const T factor = static_cast<T>(row_scale ? scale * row_scale[i] : scale);
    Sums<T, kEntropy> sums;
    T u_y = std::numeric_limits<T>::quiet_NaN();  // what a target out of range leaves of its row
    for (int64_t column = 0; column < vocab; column += kBlock) {
      block.fill(read, logits, i * stride, column, vocab, static_cast<T>(squash));
      const T block_max = block.max();
      if (block.holds(targets[i])) {
        T& at_target = block.u[targets[i] - column];
        u_y = at_target;
        at_target = -std::numeric_limits<T>::infinity();
      }
      sums.add(block, block_max, factor);
    }
    const double d_y = (u_y - sums.row_max) * factor;
    double above_one = sums.exps + std::expm1(d_y);
    if (above_one < 0) above_one = 0;  // one term is the maximum's, unless the row is all -inf
    const double ln_sum = std::log1p(above_one);
    logprob[i] = static_cast<T>(d_y - ln_sum);
    row_max[i] = sums.row_max;
    log_sum[i] = static_cast<T>(ln_sum);
    if (kEntropy) {
      const double own = d_y > Limits<T>::kFloor ? d_y * std::exp(d_y) : 0;
      entropy[i] = static_cast<T>(ln_sum - (sums.weighted + own) / (1 + above_one));
    }
  }

  void operator()(int64_t begin, int64_t end) const {
    Block<T> block;
    for (int64_t i = begin; i < end; ++i) entropy ? row<true>(i, block) : row<false>(i, block);
  }
};

template <class T>
struct GradCall {
  const void* logits;
  void* out;
  int64_t vocab, stride, out_stride;
  const int64_t* targets;
  double scale, squash;
  const T *row_scale, *logprob, *entropy, *row_max, *log_sum, *grad_logprob, *grad_entropy;
  Copy read, write;

  template <bool kEntropy>
  void row(int64_t i, Block<T>& block) const {
    const double factor = row_scale ? scale * row_scale[i] : scale;
    const bool dead = row_max[i] <= std::numeric_limits<T>::lowest();  // nothing but -inf: no gradient
    const double inverse_sum = std::exp(-static_cast<double>(log_sum[i]));
    const double minus_g = dead ? 0 : -grad_logprob[i] * factor;
    double grad_y = std::expm1(static_cast<double>(logprob[i])) * minus_g, constant = minus_g, slope = 0;
    if (kEntropy) {
      const double minus_g_h = dead ? 0 : -grad_entropy[i] * factor;
      constant += minus_g_h * (entropy[i] - log_sum[i]);
      slope = minus_g_h * inverse_sum;
      const double safe = logprob[i] < Limits<T>::kFloor ? Limits<T>::kFloor : logprob[i];
      grad_y += std::exp(safe) * (safe + entropy[i]) * minus_g_h;
    }
    const T at_zero = static_cast<T>(constant * inverse_sum), per_distance = static_cast<T>(slope);
    alignas(64) T grad[kBlock];
    for (int64_t column = 0; column < vocab; column += kBlock) {
      block.fill(read, logits, i * stride, column, vocab, static_cast<T>(squash));
      for (int64_t j = 0; j < block.padded; j += kLanes<T>) {
        const Real<T> d = block.distance(j, row_max[i], static_cast<T>(factor));
        const Real<T> bracket = kEntropy ? d * per_distance + at_zero : splat(at_zero);
        store(grad + j, exp_of<T>(d) * bracket);
      }
      if (block.holds(targets[i])) grad[targets[i] - column] = static_cast<T>(grad_y);
      if (squash != 0) {
        for (int64_t j = 0; j < block.count; ++j) {
          grad[j] *= static_cast<T>(squash) * (1 - block.u[j] * block.u[j]);
        }
      }
      write(grad, out, 0, block.count, i * out_stride + column);
    }
  }

  void operator()(int64_t begin, int64_t end) const {
    Block<T> block;
    for (int64_t i = begin; i < end; ++i) grad_entropy ? row<true>(i, block) : row<false>(i, block);
  }
};

// Calls work(begin, end) for all rows, on at most `threads` threads.
template <class Work>
void over_rows(int64_t rows, int64_t vocab, int32_t threads, const Work& work) {
  const int64_t parts = std::max<int64_t>(1, std::min<int64_t>({threads, rows, rows * vocab / kLogitsPerThread}));
  std::vector<std::thread> others;
  for (int64_t part = 1; part < parts; ++part) {
    const int64_t begin = rows * part / parts, end = rows * (part + 1) / parts;
    try {
      others.emplace_back([&work, begin, end] { work(begin, end); });
    } catch (const std::system_error&) {  // the system gives no more threads
      work(begin, end);
    }
  }
  work(0, rows / parts);
  for (auto& each : others) each.join();
}

template <class T>
const T* as(const void* values) {
  return static_cast<const T*>(values);
}

template <class T>
void stats(int32_t dtype, const void* logits, int64_t rows, int64_t vocab, int64_t stride, const int64_t* targets,
           double scale, double squash, const void* row_scale, void* const* results, int32_t threads) {
  T* to[4];
  for (int k = 0; k < 4; ++k) to[k] = static_cast<T*>(results[k]);
  const StatsCall<T> call{logits, vocab, stride, targets, scale, squash, as<T>(row_scale),
                          to[0],  to[1], to[2],  to[3],   reader<T>(dtype)};
  over_rows(rows, vocab, threads, call);
}

template <class T>
void grad(int32_t dtype, int32_t out_dtype, const void* logits, void* out, int64_t rows, int64_t vocab, int64_t stride,
          int64_t out_stride, const int64_t* targets, double scale, double squash, const void* const* vectors,
          int32_t threads) {
  const T* from[7];
  for (int k = 0; k < 7; ++k) from[k] = as<T>(vectors[k]);
  const Copy read = reader<T>(dtype), write = writer<T>(out_dtype);
  const GradCall<T> call{logits,  out,     vocab,   stride,  out_stride, targets, scale, squash, from[0],
                         from[1], from[2], from[3], from[4], from[5],    from[6], read,  write};
  over_rows(rows, vocab, threads, call);
}

}  // namespace

// `results`: logprob, entropy (null: not wanted), row_max, log_sum. These and row_scale (or null) are [rows] of the
// accumulating dtype, which is fp64 for fp64 logits and else fp32.
extern "C" void hwgrpo_row_stats(int32_t dtype, const void* logits, int64_t rows, int64_t vocab, int64_t stride,
                                 const int64_t* targets, double scale, double squash, const void* row_scale,
                                 void* const* results, int32_t threads) {
  const auto run = dtype == kFloat64 ? stats<double> : stats<float>;
  run(dtype, logits, rows, vocab, stride, targets, scale, squash, row_scale, results, threads);
}

// `vectors`: row_scale (or null), logprob, entropy, row_max, log_sum, grad_logprob, grad_entropy (null: zero).
extern "C" void hwgrpo_row_grad(int32_t dtype, int32_t out_dtype, const void* logits, void* out, int64_t rows,
                                int64_t vocab, int64_t stride, int64_t out_stride, const int64_t* targets, double scale,
                                double squash, const void* const* vectors, int32_t threads) {
  const auto run = dtype == kFloat64 ? grad<double> : grad<float>;
  run(dtype, out_dtype, logits, out, rows, vocab, stride, out_stride, targets, scale, squash, vectors, threads);
}
