// What the engine is asked to do, block sizes, and moving blocks into place.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "tile.h"

namespace {

constexpr long R = 96;    // queries of a block, a multiple of M
constexpr long C = 192;   // keys of a block, a multiple of M and of PANEL
constexpr long PAD = VL < 8 ? 8 : VL;  // zeros between the rows of a block of scores, for
constexpr long LD = C + PAD;           // diagonals that stick out: by less than VL, or than M
constexpr long CHUNK = 96;   // keys of a product that stay in L1
constexpr float LN2 = 0.69314718f, LOG2E = 1.44269504f;

static_assert(R % M == 0 && C % M == 0 && C % PANEL == 0 && CHUNK % M == 0, "block sizes");

}  // namespace

extern "C" {

struct Rows {  // a [batch, heads, length, head_dim] tensor; the last stride is 1
  float* data;  // of bf16 numbers in q, k, v, out and grad_out, if the problem is bf16
  int64_t batch, head, row;  // strides
};

struct Problem {
  int64_t batch, heads, kv_heads, q_len, k_len, dim;  // dim is a multiple of VL
  int64_t window;                           // keys a query sees at most (k_len: all)
  int64_t bf16;            // inputs are bf16, and products of their pairs
  int64_t threads, parts;  // parts: how many tasks share a pair (forward: batch and head,
                           // backward: batch and key head)
  float scale;             // times log2(e)
  float prune_log2;        // log2(keys / epsilon): what a pruned key must lie below
  Rows q, k, v, out, grad_out, grad_q, grad_k, grad_v;  // grad_q: [parts * batch, ...]
  float* lse;              // [batch, heads, q_len], base 2
  const float* bias;       // [heads, table_row]: distances k_len-1 .. 0, then -inf
  const float* weight;     // the same, then 0; or null
  float* grad_bias;        // [parts * batch, heads, table_row], or null
  float* grad_weight;
  const float* bias_after;    // [heads, k_len]: largest bias at this distance or beyond; or null
  const float* weight_after;  // [heads, k_len]: largest |weight| likewise; or null
  const float* key_bias;   // k_len floats for each (batch, head), in base e, then room; or null
  int64_t key_batch, key_head;  // its strides; 0 where a row serves many
  const float* key_origin;      // [batch, heads, q_len]: what is subtracted from a query's key
                                // biases before they are added, so that they may be large
  float* grad_key_bias;    // [batch, heads, k_len], or null
  const float* sink;       // [batch, heads, q_len], base 2, less the origin; or null
  float* grad_sink;        // the same shape, or null
  const int64_t* first_key;  // [batch, q_len]: keys before it are not seen; or null
  int64_t table_row;
  // query features x distance features: rank of them (a multiple of VL), or 0 and all null
  int64_t rank, extent;          // extent: the term is 0 from this distance on
  const float* query_features;   // [batch, heads, q_len, rank], times log2(e)
  // [heads or 1, rank, feature_row] and [heads or 1, feature_row, rank]: reversed like the bias, 0
  // outside the extent; the pointers are where distance k_len - 1 would be
  const float *distance_features, *distance_across;
  int64_t feature_head, feature_row;  // feature_head: numbers of a head, 0 where one serves all
  float* grad_query_features;    // [parts * batch, heads, q_len, rank], or null
  float* grad_distance_features; // [parts * batch, heads, feature_row, rank], placed likewise
  const float* row_scale;        // [batch, heads, q_len]: times the whole score; or null
  float* grad_row_scale;         // [parts * batch, heads, q_len], or null
  const uint64_t* row_keys;      // [batch, heads, q_len], then room: of the dropout; or null
  int64_t drop_below;            // a key whose hash lies below is dropped
  float kept_scale;              // 1 / (1 - dropout)
  int64_t tiles, tiles_visited;  // out
};

}  // extern "C"

namespace {

struct Buffer {  // aligned, not initialised
  float* data;
  explicit Buffer(int64_t count)
      : data(static_cast<float*>(std::aligned_alloc(64, (count * sizeof(float) + 127) / 64 * 64))) {}
  ~Buffer() { std::free(data); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
};

struct ScoreBlock {  // R rows of C scores, with PAD zeros before, between and after the rows
  Buffer memory;
  float* data;
  explicit ScoreBlock(bool used = true) : memory(used ? R * LD + PAD : 0), data(memory.data + PAD) {
    if (used) std::memset(memory.data, 0, (R * LD + PAD) * sizeof(float));
  }
};

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t offset_of(const Rows& t, int64_t bh, int64_t heads, int64_t i) {
  return bh / heads * t.batch + bh % heads * t.head + i * t.row;
}
float* row_of(const Rows& t, int64_t bh, int64_t heads, int64_t i) {
  return t.data + offset_of(t, bh, heads, i);
}

// A row of an input, which may be bf16.
struct Input {
  const float* row;
  const uint16_t* half;  // or null
  Input(const Problem& p, const Rows& t, int64_t bh, int64_t heads, int64_t i)
      : row(row_of(t, bh, heads, i)),
        half(p.bf16 ? reinterpret_cast<const uint16_t*>(t.data) + offset_of(t, bh, heads, i)
                    : nullptr) {}
  vf at(int64_t d) const { return half ? widened(half + d) : load(row + d); }
};

struct Packed {  // a row of floats
  const float* row;
  vf at(int64_t d) const { return load(row + d); }
};

template <class A, class B>
float dot(const A& a, const B& b, int64_t n) {
  vf total = {};
  for (int64_t d = 0; d < n; d += VL) total += a.at(d) * b.at(d);
  return sum(total);
}

// The (batch, key head) pair that a (batch, head) pair attends to.
int64_t kv_of(const Problem& p, int64_t bh) { return bh / (p.heads / p.kv_heads); }

void pack_rows(const Problem& p, const Rows& t, int64_t pair, int64_t heads, int64_t first,
               int64_t count, float scale, float* out) {
  for (int64_t i = 0; i < count; ++i) {
    const Input in(p, t, pair, heads, first + i);
    for (int64_t d = 0; d < p.dim; d += VL) store(out + i * p.dim + d, in.at(d) * splat(scale));
  }
}

// Keys [first, first + count) as panels [PANEL keys across, dim down]; missing keys are zero. In
// bf16 a panel has dim / 2 pairs down, which are the words of a key's row.
void pack_panels(const Problem& p, const Rows& t, int64_t kv, int64_t first, int64_t count,
                 float* out) {
  const int64_t words = p.bf16 ? p.dim / 2 : p.dim;
  for (int64_t c = 0; c < count; c += PANEL) {
    float* panel = out + c * p.dim;
    for (int64_t j = 0; j < PANEL; ++j) {
      if (c + j >= count) {
        for (int64_t d = 0; d < words; ++d) panel[d * PANEL + j] = 0.0f;
        continue;
      }
      const Input in(p, t, kv, p.kv_heads, first + c + j);
      const char* row = in.half ? reinterpret_cast<const char*>(in.half)
                                : reinterpret_cast<const char*>(in.row);
      for (int64_t d = 0; d < words; ++d) std::memcpy(panel + d * PANEL + j, row + 4 * d, 4);
    }
  }
}

// What a (batch, head) pair adds to its scores, and which keys its queries see.
struct Terms {
  const float *bias, *weight;           // at the reversed table's start
  const float *key_bias, *key_origin;   // by key, by query; or null
  const float* sink;                    // by query; or null
  const int64_t* first_key;             // by query, rising; or null
  const float *query_features, *row_scale;            // by query; or null
  const float *distance_features, *distance_across;   // at the reversed table's start
  const uint64_t* row_keys;             // by query; or null
  Terms(const Problem& p, int64_t bh)
      : bias(p.bias + bh % p.heads * p.table_row),
        weight(p.weight ? p.weight + bh % p.heads * p.table_row : nullptr),
        key_bias(p.key_bias ? p.key_bias + bh / p.heads * p.key_batch + bh % p.heads * p.key_head
                            : nullptr),
        key_origin(p.key_bias ? p.key_origin + bh * p.q_len : nullptr),
        sink(p.sink ? p.sink + bh * p.q_len : nullptr),
        first_key(p.first_key ? p.first_key + bh / p.heads * p.q_len : nullptr),
        query_features(p.rank ? p.query_features + bh * p.q_len * p.rank : nullptr),
        row_scale(p.row_scale ? p.row_scale + bh * p.q_len : nullptr),
        distance_features(p.rank ? p.distance_features + bh % p.heads * p.feature_head : nullptr),
        distance_across(p.rank ? p.distance_across + bh % p.heads * p.feature_head : nullptr),
        row_keys(p.row_keys ? p.row_keys + bh * p.q_len : nullptr) {}
};

struct Block {  // of scores: rows queries from q0, which stands at first_pos; keys from c0
  int64_t q0, first_pos, rows, c0;
};

// The part of a block of keys that the M queries from row r see: [begin, end), begin on a panel.
struct Span {
  int64_t begin, end;
};
ALWAYS_INLINE Span span_of(const Problem& p, const Terms& t, const Block& b, int64_t r) {
  const int64_t pos = b.first_pos + r;
  int64_t oldest = std::max<int64_t>(0, pos - p.window + 1 - b.c0);
  if (t.first_key) oldest = std::max(oldest, t.first_key[b.q0 + r] - b.c0);
  const int64_t end = std::min<int64_t>(C, std::min(pos + M, p.k_len) - b.c0);
  return {std::min(oldest / PANEL * PANEL, C), std::max<int64_t>(end, 0)};
}

// Whether some of the M queries from row r come after keys of the panel at c that they do not see.
inline bool hides(const Problem& p, const Terms& t, const Block& b, int64_t r, int64_t c) {
  return t.first_key && t.first_key[std::min(b.q0 + r + M, p.q_len) - 1] > b.c0 + c;
}

// -inf for those keys.
template <int N>
inline void hide_earlier(const Problem& p, const Terms& t, const Block& b, int64_t r, int64_t c,
                         vf (&acc)[M][N]) {
  each<M, N>([&](int m, int v) {
    const int64_t first = t.first_key[std::min(b.q0 + r + m, p.q_len - 1)];
    const int64_t hidden = std::min<int64_t>(first - b.c0 - c - v * VL, VL);
    acc[m][v] = lanes_before(static_cast<int>(hidden)) ? splat(-INFINITY) : acc[m][v];
  });
}

// Calls f(number of vectors, whether keys are hidden, r, c) for the tiles that are seen.
template <class F>
void each_tile(const Problem& p, const Terms& t, const Block& b, F f) {
  for (int64_t c = 0; c < C; c += PANEL) {
    for (int64_t r = 0; r < b.rows; r += M) {
      const Span span = span_of(p, t, b, r);
      if (c < span.begin || c >= span.end) continue;
      const int64_t vectors = ceil_div(std::min<int64_t>(span.end - c, PANEL), VL);
      if (hides(p, t, b, r, c))  // seldom: its code must not cost the other case its registers
        apart([&f, vectors, r, c] {
          with_vectors(vectors, [&](auto n) { f(n, std::true_type{}, r, c); });
        });
      else
        with_vectors(vectors, [&](auto n) { f(n, std::false_type{}, r, c); });
    }
  }
}

// The key biases of a tile: what each adds to the scores of query m, in base 2.
template <int N>
struct KeyTerms {
  vf keys[N];
  const float* origin;
  KeyTerms(const Terms& t, const Block& b, int64_t r, int64_t c) : origin(t.key_origin + b.q0 + r) {
    for (int v = 0; v < N; ++v) keys[v] = load(t.key_bias + b.c0 + c + v * VL);
  }
  vf at(int m, int v) const { return (keys[v] - splat(origin[m])) * splat(LOG2E); }
};

// A tile of products of rows of `left` and panels of `right`, both of p.dim numbers.
template <int N>
ALWAYS_INLINE void multiply_rows(const Problem& p, vf (&acc)[M][N], const float* left, int64_t row,
                                 const float* panel) {
  if (p.bf16)
    multiply_pairs<N>(acc, left + row * (p.dim / 2), p.dim / 2, 1, panel, PANEL, p.dim / 2);
  else
    multiply<N>(acc, left + row * p.dim, p.dim, 1, panel, PANEL, p.dim);
}

// Whether the tile of M rows from r and `columns` keys from c has a distance below the extent.
ALWAYS_INLINE bool is_near(const Problem& p, const Block& b, int64_t r, int64_t c,
                           int64_t columns) {
  return p.rank && b.first_pos + r - (b.c0 + c + columns - 1) < p.extent;
}

// acc[m][v] += sum over f of features[m][f] * table[f][distance of m and the keys of v]. The right
// side moves by one from row to row: the skew is in the addresses, and no product is kept.
template <int N>
ALWAYS_INLINE void add_features(const Problem& p, vf (&acc)[M][N], const float* features,
                                const float* table) {
  for (int64_t f = 0; f < p.rank; ++f, table += p.feature_row)
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const vf a = splat(features[m * p.rank + f]);
#pragma GCC unroll 8
      for (int v = 0; v < N; ++v) acc[m][v] += a * load(table - m + v * VL);
    }
}

// What belongs to the queries of some rows: features, and factors of the scores. Rows that fill up
// a tile have features of 0 and a factor of 1.
void load_row_terms(const Problem& p, const Terms& t, int64_t first, int64_t count, int64_t rows,
                    float* features, float* row_scale) {
  if (p.rank) {
    std::copy_n(t.query_features + first * p.rank, count * p.rank, features);
    std::fill_n(features + count * p.rank, (rows - count) * p.rank, 0.0f);
  }
  if (t.row_scale) {
    std::copy_n(t.row_scale + first, count, row_scale);
    std::fill_n(row_scale + count, rows - count, 1.0f);
  }
}

// out[r] += block[r][span] * right, for tiles of rows; right is [C, dim]. In bf16 both are pairs
// of keys, and a row of the block is C / 2 of them.
void multiply_block(const Problem& p, const Terms& t, const Block& b, const float* block,
                    const float* right, float* out) {
  const int64_t chunk = p.bf16 ? C : CHUNK;  // pairs are half as large
  for (int64_t k = 0; k < C; k += chunk) {
    for (int64_t r = 0; r < b.rows; r += M) {
      const Span span = span_of(p, t, b, r);
      const int64_t begin = std::max(k, span.begin), end = std::min(k + chunk, span.end);
      if (begin >= end) continue;
      if (p.bf16)
        accumulate<true>(block + r * (C / 2) + begin / 2, C / 2, 1, right + begin / 2 * p.dim, p.dim,
                         (end - begin + 1) / 2, out + r * p.dim);
      else
        accumulate<false>(block + r * LD + begin, LD, 1, right + begin * p.dim, p.dim, end - begin,
                          out + r * p.dim);
    }
  }
}

}  // namespace
