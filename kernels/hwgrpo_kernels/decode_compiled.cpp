// Attention and norms of a decode step for a CPU. Formulas and the meaning of arguments: decode_definitions.py. Called from
// decode_compiled.py.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "rows_dtypes.h"
#include "rows_vectors.h"

namespace {

constexpr int64_t kTile = 64;    // tokens whose keys, then values, are in the first-level cache
constexpr int64_t kRows = 4;     // rows of a prompt that read a tile of it together
constexpr int64_t kQueries = 4;  // queries whose sums are in registers
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int64_t kColumns = 4;  // vectors of them per query: 32 registers
#else
constexpr int64_t kColumns = 2;
#endif
constexpr int64_t kLeastProducts = int64_t{1} << 20;  // below it, waking other threads takes longer: 20 us
constexpr int64_t kLeastNormed = int64_t{1} << 17;

// OpenMP's own entry point: it runs a function in the calling thread and in others of the runtime's pool.
using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

// Calls work(item) for all items, in any order, on `threads` threads of a pool, or in the calling thread without one.
template <class Work>
void over_items(int64_t items, const Work& work, Parallel parallel, int32_t threads) {
  struct Shared {
    const Work& work;
    int64_t items;
    std::atomic<int64_t> next;
  } shared{work, items, {0}};
  const auto run = [](void* data) {
    auto& all = *static_cast<Shared*>(data);
    for (int64_t item; (item = all.next.fetch_add(1, std::memory_order_relaxed)) < all.items;) all.work(item);
  };
  if (parallel == nullptr || threads < 2 || items < 2) {
    run(&shared);
  } else {
    parallel(run, &shared, static_cast<unsigned>(threads), 0);
  }
}

// Room for values of the calling thread, aligned to a vector; it is kept for later calls.
template <class T>
T* scratch(int64_t count) {
  thread_local std::vector<char> kept;
  const size_t bytes = static_cast<size_t>(count) * sizeof(T) + 64;
  if (kept.size() < bytes) kept.resize(bytes);
  const auto start = reinterpret_cast<uintptr_t>(kept.data());
  return reinterpret_cast<T*>((start + 63) / 64 * 64);
}

// Elements 0, 2, 4, ... of `a`, then of `b`, plus elements 1, 3, 5, ...
template <class T, class V, size_t... kLane>
inline V add_neighbours(V a, V b, std::index_sequence<kLane...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, (2 * kLane)...) + __builtin_shufflevector(a, b, (2 * kLane + 1)...);
#else
  const Int<T> even{(2 * kLane)...}, odd{(2 * kLane + 1)...};
  return __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, odd);
#endif
}

// The vector with elements that are kApart from each other exchanged.
template <class T, size_t kApart, class V, size_t... kLane>
inline V exchanged(V v, std::index_sequence<kLane...>) {
#if defined(__clang__)
  return __builtin_shufflevector(v, v, (kLane ^ kApart)...);
#else
  const Int<T> from{(kLane ^ kApart)...};
  return __builtin_shuffle(v, from);
#endif
}

// The sum of all elements, or the greatest, in an order that is faster than one by one.
template <class T, bool kMax, size_t kApart = kLanes<T> / 2>
inline T folded(Real<T> v) {
  if constexpr (kApart > 0) {
    const Real<T> other = exchanged<T, kApart>(v, std::make_index_sequence<kLanes<T>>{});
    if constexpr (kMax) {
      v = v > other ? v : other;
    } else {
      v += other;
    }
    return folded<T, kMax, kApart / 2>(v);
  }
  return v[0];
}

// The sums of as many vectors as a vector has elements.
template <class T, int64_t kCount = kLanes<T>>
inline Real<T> sums_of(Real<T>* each) {
  if constexpr (kCount > 1) {
#pragma GCC unroll 8
    for (int64_t k = 0; k < kCount / 2; ++k) {
      each[k] = add_neighbours<T>(each[2 * k], each[2 * k + 1], std::make_index_sequence<kLanes<T>>{});
    }
    return sums_of<T, kCount / 2>(each);
  }
  return each[0];
}

// Products of a query with a vector's number of keys. A constant size spares registers for addresses; 0: any size.
template <class T, int64_t kSize = 0>
inline Real<T> products(const T* query, const T* keys, int64_t size) {
  const int64_t padded = kSize > 0 ? kSize : size;
  Real<T> sum[kLanes<T>] = {};
  for (int64_t j = 0; j < padded; j += kLanes<T>) {
    const Real<T> q = load(query + j);
#pragma GCC unroll 16
    for (int64_t k = 0; k < kLanes<T>; ++k) sum[k] += q * load(keys + k * padded + j);
  }
  return sums_of<T>(sum);
}

// Likewise, with `count` keys, which are fewer; elements beyond them are zero.
template <class T>
inline Real<T> products_of_rest(const T* query, const T* keys, int64_t count, int64_t padded) {
  Real<T> sum[kLanes<T>] = {};
  for (int64_t k = 0; k < count; ++k) {
    Real<T> of_key = {};
    for (int64_t j = 0; j < padded; j += kLanes<T>) of_key += load(query + j) * load(keys + k * padded + j);
    sum[k] = of_key;
  }
  return sums_of<T>(sum);
}

// Adds the values of `count` tokens, times their weights, to the sums of some queries in some columns.
template <class T, int64_t kOf, int64_t kVectors>
inline void add_values(const T* weights, const T* values, int64_t count, int64_t padded, T* sums) {
  Real<T> held[kOf][kVectors];
  for (int64_t q = 0; q < kOf; ++q) {
    for (int64_t c = 0; c < kVectors; ++c) held[q][c] = load(sums + q * padded + c * kLanes<T>);
  }
  for (int64_t k = 0; k < count; ++k) {
    Real<T> value[kVectors];
#pragma GCC unroll 4
    for (int64_t c = 0; c < kVectors; ++c) value[c] = load(values + k * padded + c * kLanes<T>);
#pragma GCC unroll 4
    for (int64_t q = 0; q < kOf; ++q) {
      const Real<T> weight = splat(weights[q * kTile + k]);
#pragma GCC unroll 4
      for (int64_t c = 0; c < kVectors; ++c) held[q][c] += weight * value[c];
    }
  }
  for (int64_t q = 0; q < kOf; ++q) {
    for (int64_t c = 0; c < kVectors; ++c) store(sums + q * padded + c * kLanes<T>, held[q][c]);
  }
}

template <class T, int64_t kOf>
inline void add_all_columns(const T* weights, const T* values, int64_t count, int64_t padded, T* sums) {
  int64_t j = 0;
  for (; j + kColumns * kLanes<T> <= padded; j += kColumns * kLanes<T>) {
    add_values<T, kOf, kColumns>(weights, values + j, count, padded, sums + j);
  }
  for (; j < padded; j += kLanes<T>) add_values<T, kOf, 1>(weights, values + j, count, padded, sums + j);
}

// Sizes and strides in elements, in the order in which decode_compiled.py has them.
struct Sizes {
  int64_t rows, heads, group, size, width, capacity, prompts, positions;
  int64_t query_row, query_head, key_row, key_head, value_row, value_head;
  int64_t prompts_kv, prompts_head, prompts_prompt, responses_kv, responses_head, responses_row;
};

// Likewise.
struct Tensors {
  const void *query, *key, *value, *cos, *sin, *prompts;
  void *responses, *out;
  const int64_t *offset, *prompt_of, *prompt_length, *length;
};

// Neighbouring rows of one prompt.
struct Rows {
  int64_t first, count;
};

template <class T>
struct AttentionCall {
  Tensors at;
  Sizes is;
  T scaling;
  Copy read, write, read_angle;
  int64_t itemsize;
  bool direct;  // keys and values are used where they are, without a copy
  std::vector<Rows> blocks;

  int64_t padded() const { return (is.size + kLanes<T> - 1) / kLanes<T> * kLanes<T>; }

  // What a block's queries [M] have so far: of the tokens seen, the highest score, the sum of weights, and the sum of
  // weighted values [M, padded]; the weights [M, kTile] of a tile.
  struct State {
    T *query, *sums, *weights, *top, *total, *tile, *cos, *sin, *pair;
    void* rounded;
  };

  State state(int64_t queries) const {
    const int64_t wide = padded();
    T* next = scratch<T>(queries * (2 * wide + kTile + 2 * kLanes<T>) + kTile * wide + 6 * wide);
    State made{};
    const auto take = [&next](int64_t count) {
      T* start = next;
      next += (count + kLanes<T> - 1) / kLanes<T> * kLanes<T>;
      return start;
    };
    made.query = take(queries * wide);
    made.sums = take(queries * wide);
    made.weights = take(queries * kTile);
    made.tile = take(kTile * wide);
    made.cos = take(wide);
    made.sin = take(wide);
    made.pair = take(2 * wide);
    made.rounded = take(wide);
    made.top = take(queries);
    made.total = take(queries);
    if (wide != is.size) {  // columns beyond the head's size are zero
      std::fill(made.query, made.query + queries * wide, T(0));
      std::fill(made.tile, made.tile + kTile * wide, T(0));
    }
    std::fill(made.sums, made.sums + queries * wide, T(0));
    std::fill(made.top, made.top + queries, -std::numeric_limits<T>::infinity());
    std::fill(made.total, made.total + queries, T(0));
    return made;
  }

  // Rotates a head, which begins at an element of `from`, and writes it in the query's dtype at an element of `to`.
  void rotate(const State& in, const void* from, int64_t element, void* to, int64_t place) const {
    const int64_t half = is.size / 2;
    T* __restrict__ x = in.pair;
    T* __restrict__ y = in.pair + padded();
    const T* __restrict__ cos = in.cos;
    const T* __restrict__ sin = in.sin;
    read(from, x, element, is.size, 0);
    for (int64_t j = 0; j < half; ++j) {
      y[j] = x[j] * cos[j] - x[j + half] * sin[j];
      y[j + half] = x[j + half] * cos[j + half] + x[j] * sin[j + half];
    }
    write(y, to, 0, is.size, place);
  }

  // Appends the newest key and value of a row to its buffer, and rotates its queries.
  void begin(const State& in, int64_t row, int64_t head, T* query) const {
    const int64_t angle = (at.offset[row] + at.length[row]) * is.size;
    read_angle(at.cos, in.cos, angle, is.size, 0);
    read_angle(at.sin, in.sin, angle, is.size, 0);
    const int64_t newest = head * is.responses_head + row * is.responses_row + (at.length[row] - 1) * is.size;
    rotate(in, at.key, row * is.key_row + head * is.key_head, at.responses, newest);
    const int64_t value = row * is.value_row + head * is.value_head;
    std::memcpy(static_cast<char*>(at.responses) + (is.responses_kv + newest) * itemsize,
                static_cast<const char*>(at.value) + value * itemsize, static_cast<size_t>(is.size * itemsize));
    for (int64_t g = 0; g < is.group; ++g) {
      rotate(in, at.query, row * is.query_row + (head * is.group + g) * is.query_head, in.rounded, 0);
      read(in.rounded, query + g * padded(), 0, is.size, 0);
    }
  }

  // Keys or values of `count` tokens, which begin at an element of `from`: [count, padded].
  const T* tile(const State& in, const void* from, int64_t element, int64_t count) const {
    if (direct) return static_cast<const T*>(from) + element;
    if (padded() == is.size) {
      read(from, in.tile, element, count * is.size, 0);
    } else {
      for (int64_t k = 0; k < count; ++k) read(from, in.tile, element + k * is.size, is.size, k * padded());
    }
    return in.tile;
  }

  // Scores of a tile's tokens, and their weights under the highest score so far.
  void weigh(const State& in, int64_t query, const T* keys, int64_t count) const {
    constexpr T kNone = -std::numeric_limits<T>::infinity();
    T* weights = in.weights + query * kTile;
    const int64_t wide = padded();
    const int64_t whole = (count + kLanes<T> - 1) / kLanes<T> * kLanes<T>;
    Real<T> best = splat(kNone);
    for (int64_t k = 0; k < whole; k += kLanes<T>) {
      const T *of = in.query + query * wide, *from = keys + k * wide;
      const int64_t rest = count - k;
      Real<T> score;
      if (rest < kLanes<T>) {
        score = products_of_rest(of, from, rest, wide);
      } else if (wide == 64) {
        score = products<T, 64>(of, from, wide);
      } else {
        score = wide == 128 ? products<T, 128>(of, from, wide) : products<T>(of, from, wide);
      }
      store(weights + k, score * scaling);
      if (rest < kLanes<T>) std::fill(weights + count, weights + whole, kNone);
      score = load(weights + k);
      best = score > best ? score : best;  // passes over NaN, which the weights show
    }
    const T top = std::max(in.top[query], folded<T, true>(best));
    Real<T> total = {};
    for (int64_t k = 0; k < whole; k += kLanes<T>) {
      const Real<T> weight = exp_of<T>(load(weights + k) - top);
      total += weight;
      store(weights + k, weight);
    }
    if (top > in.top[query]) {
      if (in.total[query] != 0) {
        const T shrink = exp_of<T>(splat(in.top[query] - top))[0];
        T* sums = in.sums + query * padded();
        for (int64_t j = 0; j < padded(); j += kLanes<T>) store(sums + j, load(sums + j) * shrink);
        in.total[query] *= shrink;
      }
      in.top[query] = top;
    }
    in.total[query] += folded<T, false>(total);
  }

  // Attends from some queries to the tokens first <= token < last, whose keys and values begin at an element of `from`.
  void attend(const State& in, int64_t query, int64_t queries, const void* from, int64_t element, int64_t to_values,
              int64_t first, int64_t last) const {
    for (int64_t token = first; token < last; token += kTile) {
      const int64_t count = std::min(kTile, last - token), place = element + token * is.size;
      const T* keys = tile(in, from, place, count);
      for (int64_t m = query; m < query + queries; ++m) weigh(in, m, keys, count);
      const T* values = tile(in, from, place + to_values, count);
      for (int64_t m = query; m < query + queries; m += kQueries) {
        const T* weights = in.weights + m * kTile;
        T* sums = in.sums + m * padded();
        switch (std::min(kQueries, query + queries - m)) {
          case 1: add_all_columns<T, 1>(weights, values, count, padded(), sums); break;
          case 2: add_all_columns<T, 2>(weights, values, count, padded(), sums); break;
          case 3: add_all_columns<T, 3>(weights, values, count, padded(), sums); break;
          default: add_all_columns<T, 4>(weights, values, count, padded(), sums);
        }
      }
    }
  }

  void operator()(int64_t item) const {
    const Rows block = blocks[static_cast<size_t>(item / is.heads)];
    const int64_t head = item % is.heads, group = is.group, queries = block.count * group;
    const State in = state(queries);
    for (int64_t r = 0; r < block.count; ++r) begin(in, block.first + r, head, in.query + r * group * padded());
    const int64_t shared = head * is.prompts_head + at.prompt_of[block.first] * is.prompts_prompt;
    const int64_t padding = is.width - at.prompt_length[block.first];
    attend(in, 0, queries, at.prompts, shared, is.prompts_kv, padding, is.width);
    for (int64_t r = 0; r < block.count; ++r) {
      const int64_t row = block.first + r, own = head * is.responses_head + row * is.responses_row;
      attend(in, r * group, group, at.responses, own, is.responses_kv, 0, at.length[row]);
      for (int64_t g = 0; g < group; ++g) {
        const int64_t m = r * group + g;
        T* sums = in.sums + m * padded();
        const T share = 1 / in.total[m];
        for (int64_t j = 0; j < padded(); j += kLanes<T>) store(sums + j, load(sums + j) * share);
        write(sums, at.out, 0, is.size, ((row * is.heads + head) * group + g) * is.size);
      }
    }
  }
};

bool inside(const Tensors& at, const Sizes& is) {
  for (int64_t row = 0; row < is.rows; ++row) {
    const int64_t position = at.offset[row] + at.length[row];
    if (at.length[row] < 1 || at.length[row] > is.capacity || position < 0 || position >= is.positions ||
        at.prompt_of[row] < 0 || at.prompt_of[row] >= is.prompts || at.prompt_length[row] < 1 ||
        at.prompt_length[row] > is.width) {
      return false;
    }
  }
  return true;
}

std::vector<Rows> blocks_of(const Tensors& at, const Sizes& is) {
  std::vector<Rows> blocks;
  for (int64_t row = 0; row < is.rows; ++row) {
    const bool joins = !blocks.empty() && blocks.back().count < kRows &&
                       at.prompt_of[row] == at.prompt_of[blocks.back().first] &&
                       at.prompt_length[row] == at.prompt_length[blocks.back().first];
    if (joins) {
      ++blocks.back().count;
    } else {
      blocks.push_back({row, 1});
    }
  }
  return blocks;
}

template <class T>
void attention(int32_t dtype, int32_t angle_dtype, const Tensors& at, const Sizes& is, double scaling,
               Parallel parallel, int32_t threads) {
  const int64_t itemsize = dtype == kFloat64 ? 8 : dtype == kFloat32 ? 4 : 2;
  const bool direct = itemsize == sizeof(T) && is.size % kLanes<T> == 0;
  const AttentionCall<T> call{at, is, static_cast<T>(scaling), reader<T>(dtype), writer<T>(dtype),
                              reader<T>(angle_dtype), itemsize, direct, blocks_of(at, is)};
  int64_t tokens = 0;
  for (int64_t row = 0; row < is.rows; ++row) tokens += at.prompt_length[row] + at.length[row];
  const bool alone = tokens * is.heads * is.group * is.size < kLeastProducts;
  over_items(static_cast<int64_t>(call.blocks.size()) * is.heads, call, alone ? nullptr : parallel, threads);
}

template <class T>
struct NormCall {
  const void *x, *weight;
  void* out;
  int64_t columns, row;
  double eps;
  Copy read, read_weight, write;

  void operator()(int64_t item) const {
    const int64_t padded = (columns + kLanes<T> - 1) / kLanes<T> * kLanes<T>;
    T* values = scratch<T>(2 * padded);
    T* weights = values + padded;
    read(x, values, item * row, columns, 0);
    read_weight(weight, weights, 0, columns, 0);
    std::fill(values + columns, values + padded, T(0));
    std::fill(weights + columns, weights + padded, T(0));
    Real<T> squares = {};
    for (int64_t j = 0; j < padded; j += kLanes<T>) squares += load(values + j) * load(values + j);
    const T factor = static_cast<T>(1 / std::sqrt(static_cast<double>(folded<T, false>(squares)) / columns + eps));
    for (int64_t j = 0; j < padded; j += kLanes<T>) store(values + j, load(values + j) * factor * load(weights + j));
    write(values, out, 0, columns, item * columns);
  }
};

template <class T>
void norm(int32_t dtype, int32_t weight_dtype, const void* x, const void* weight, void* out, int64_t rows,
          int64_t columns, int64_t row, double eps, Parallel parallel, int32_t threads) {
  const NormCall<T> call{x, weight, out, columns, row, eps, reader<T>(dtype), reader<T>(weight_dtype), writer<T>(dtype)};
  over_items(rows, call, rows * columns < kLeastNormed ? nullptr : parallel, threads);
}

}  // namespace

// Returns 0, or 1 if a length, a prompt or a position is out of range: nothing is written then.
extern "C" int32_t hwgrpo_decode_attention(int32_t dtype, int32_t angle_dtype, const void* tensors, const void* sizes,
                                           double scaling, void* parallel, int32_t threads) {
  Tensors at;
  Sizes is;
  std::memcpy(&at, tensors, sizeof(at));
  std::memcpy(&is, sizes, sizeof(is));
  if (!inside(at, is)) return 1;
  const auto run = dtype == kFloat64 ? attention<double> : attention<float>;
  run(dtype, angle_dtype, at, is, scaling, reinterpret_cast<Parallel>(parallel), threads);
  return 0;
}

extern "C" void hwgrpo_rms_norm(int32_t dtype, int32_t weight_dtype, const void* x, const void* weight, void* out,
                                int64_t rows, int64_t columns, int64_t row, double eps, void* parallel,
                                int32_t threads) {
  const auto run = dtype == kFloat64 ? norm<double> : norm<float>;
  run(dtype, weight_dtype, x, weight, out, rows, columns, row, eps, reinterpret_cast<Parallel>(parallel), threads);
}
