// The backward pass of one (batch, head) pair: blocks of keys outside, blocks of queries inside.
//
// Probabilities are computed again from the saved logsumexp; five products a block. The gradient
// of the table is the sum along the diagonals of the gradient of the scores.

#pragma once

#include "pruning.h"

namespace {

struct BackwardScratch {
  int64_t q_rows;
  Buffer q, grad_out, grad_q, lse, delta;                // the whole length
  Buffer keys, key_panels, value_panels, grad_k, grad_v, grad_key;  // one block of keys
  Buffer features, row_scale, grad_features, grad_row_scale;  // the whole length
  ScoreBlock probs, grads, plain, product, unscaled;
  Buffer q_pairs, grad_out_pairs;                  // bf16: pairs of queries
  Buffer probs_down, grads_down, grads_across;     // pairs of queries; of keys
  explicit BackwardScratch(const Problem& p)
      : q_rows(ceil_div(p.q_len, R) * R), q(q_rows * p.dim), grad_out(q_rows * p.dim),
        grad_q(q_rows * p.dim), lse(q_rows), delta(q_rows), keys(C * p.dim),
        key_panels(C * p.dim), value_panels(C * p.dim), grad_k(C * p.dim), grad_v(C * p.dim),
        grad_key(C), features(q_rows * p.rank), row_scale(q_rows), grad_features(q_rows * p.rank),
        grad_row_scale(q_rows), plain(p.weight != nullptr), product(p.weight != nullptr),
        unscaled(p.grad_row_scale != nullptr),
        q_pairs(p.bf16 ? q_rows / 2 * p.dim : 0), grad_out_pairs(p.bf16 ? q_rows / 2 * p.dim : 0),
        probs_down(R / 2 * LD), grads_down(R / 2 * LD), grads_across(R * C / 2) {}
};

struct Sums {  // gradients of a (batch, head) pair's terms that this task adds to; or null
  float *bias, *weight;  // at the reversed table's start
  float* key_bias;       // by key
  float* distance_features;  // at the reversed table's start, [.., rank]
};

void load_pair(const Problem& p, BackwardScratch& s, const Terms& t, int64_t bh) {
  pack_rows(p, p.q, bh, p.heads, 0, p.q_len, p.bf16 ? 1.0f : p.scale, s.q.data);
  pack_rows(p, p.grad_out, bh, p.heads, 0, p.q_len, 1.0f, s.grad_out.data);
  std::memset(s.grad_q.data, 0, s.q_rows * p.dim * sizeof(float));
  for (int64_t i = 0; i < p.q_len; ++i) {
    s.lse.data[i] = p.lse[bh * p.q_len + i];
    const Input out(p, p.out, bh, p.heads, i);
    s.delta.data[i] = dot(out, Packed{s.grad_out.data + i * p.dim}, p.dim);
  }
  // The rows that fill up the last block have probabilities of 0.
  const int64_t missing = s.q_rows - p.q_len;
  std::fill_n(s.q.data + p.q_len * p.dim, missing * p.dim, 0.0f);
  std::fill_n(s.grad_out.data + p.q_len * p.dim, missing * p.dim, 0.0f);
  std::fill_n(s.lse.data + p.q_len, missing, INFINITY);
  std::fill_n(s.delta.data + p.q_len, missing, 0.0f);
  load_row_terms(p, t, 0, p.q_len, s.q_rows, s.features.data, s.row_scale.data);
  std::fill_n(s.grad_features.data, s.q_rows * p.rank, 0.0f);
  std::fill_n(s.grad_row_scale.data, s.q_rows, 0.0f);
  if (!p.bf16) return;
  to_pairs_down(s.q.data, s.q_rows, p.dim, p.dim, s.q_pairs.data);
  to_pairs_down(s.grad_out.data, s.q_rows, p.dim, p.dim, s.grad_out_pairs.data);
  to_pairs_across(s.q.data, s.q_rows * p.dim, s.q.data);
  to_pairs_across(s.grad_out.data, s.q_rows * p.dim, s.grad_out.data);
}

// The sink has no value: its gradient is its probability times -delta.
void sink_grads(const Problem& p, const BackwardScratch& s, const Terms& t, int64_t bh) {
  for (int64_t i = 0; i < p.q_len; ++i)
    p.grad_sink[bh * p.q_len + i] = -std::exp2(t.sink[i] - s.lse.data[i]) * s.delta.data[i];
}

void load_keys(const Problem& p, BackwardScratch& s, int64_t kv, int64_t c0, int64_t count) {
  const size_t bytes = C * p.dim * sizeof(float);
  std::memset(s.keys.data, 0, bytes);
  std::memset(s.grad_k.data, 0, bytes);
  std::memset(s.grad_v.data, 0, bytes);
  std::fill(s.grad_key.data, s.grad_key.data + C, 0.0f);
  pack_rows(p, p.k, kv, p.kv_heads, c0, count, 1.0f, s.keys.data);
  if (p.bf16) to_pairs_down(s.keys.data, C, p.dim, p.dim, s.keys.data);
  pack_panels(p, p.k, kv, c0, count, s.key_panels.data);
  pack_panels(p, p.v, kv, c0, count, s.value_panels.data);
}

// Zeros in the parts of some rows that are not visited.
void clear_outside(float* block, int64_t first, int64_t rows, Span span) {
  const int64_t end = span.begin < span.end ? ceil_div(span.end, VL) * VL : span.begin;
  for (int64_t m = first; m < first + rows; ++m) {
    std::fill(block + m * LD, block + m * LD + span.begin, 0.0f);
    std::fill(block + m * LD + end, block + m * LD + C, 0.0f);
  }
}

// Rows of a tile as pairs of queries: row 2i and row 2i + 1 as row i.
template <int N>
ALWAYS_INLINE void store_pairs_down(const vf (&acc)[M][N], float* out, int64_t r, int64_t c) {
  each<M / 2, N>([&](int m, int v) {
    store_pairs_of(out + (r / 2 + m) * LD + c + v * VL, acc[2 * m][v], acc[2 * m + 1][v]);
  });
}

// The same as pairs of keys; an odd vector at the end has zeros beside it.
template <int N>
ALWAYS_INLINE void store_pairs_across(const vf (&acc)[M][N], float* out, int64_t r, int64_t c) {
  each<M, (N + 1) / 2>([&](int m, int v) {
    const vf high = 2 * v + 1 < N ? acc[m][2 * v + 1 < N ? 2 * v + 1 : 0] : vf{};
    store_pairs(out + (r + m) * (C / 2) + c / 2 + v * VL, acc[m][2 * v], high);
  });
}

// probs = exp2(score - logsumexp), negative where dropout drops; product = the unweighted scores, if
// there are weights.
template <bool WEIGHTED, bool KEYED>
void recompute_probs(const Problem& p, BackwardScratch& s, const Terms& t, const Block& b) {
  float *probs = s.probs.data, *product = s.product.data;
  each_tile(p, t, b, [&](auto n, auto hidden, int64_t r, int64_t c) {
    constexpr int N = decltype(n)::value;
    const long shift = p.k_len - 1 - (b.first_pos + r) + b.c0 + c;
    const float* factor = s.row_scale.data + b.q0 + r;
    // the logsumexp is subtracted at once, but after a factor of the whole score
    float lse[M];
    for (int m = 0; m < M; ++m) lse[m] = t.row_scale ? 0.0f : s.lse.data[b.q0 + r + m];
    vf acc[M][N];
    if (WEIGHTED || p.bf16)
      each<M, N>([&](int m, int v) { acc[m][v] = vf{}; });
    else
      each<M, N>([&](int m, int v) {
        acc[m][v] = load(t.bias + shift - m + v * VL) - splat(lse[m]);
      });
    multiply_rows<N>(p, acc, s.q.data, b.q0 + r, s.key_panels.data + c * p.dim);
    if (p.bf16)
      each<M, N>([&](int m, int v) {
        acc[m][v] *= splat(p.scale);
        if (!WEIGHTED) acc[m][v] += load(t.bias + shift - m + v * VL) - splat(lse[m]);
      });
    if constexpr (WEIGHTED) {
      each<M, N>([&](int m, int v) {
        const long d = shift - m + v * VL;
        store(product + (r + m) * LD + c + v * VL, acc[m][v] * splat(LN2));  // back to base e
        acc[m][v] = acc[m][v] * load(t.weight + d) + (load(t.bias + d) - splat(lse[m]));
      });
    }
    if constexpr (KEYED) {
      const KeyTerms<N> key_terms(t, b, r, c);
      each<M, N>([&](int m, int v) { acc[m][v] += key_terms.at(m, v); });
    }
    if (is_near(p, b, r, c, N * VL))
      add_features<N>(p, acc, s.features.data + (b.q0 + r) * p.rank, t.distance_features + shift);
    if (t.row_scale) {
      if (p.grad_row_scale)  // a hidden key's -inf meets a gradient of 0
        each<M, N>([&](int m, int v) {
          store(s.unscaled.data + (r + m) * LD + c + v * VL, larger(acc[m][v], splat(-1e30f)));
        });
      each<M, N>([&](int m, int v) {
        acc[m][v] = acc[m][v] * splat(factor[m]) - splat(s.lse.data[b.q0 + r + m]);
      });
    }
    if constexpr (hidden.value) hide_earlier<N>(p, t, b, r, c, acc);
    each<M, N>([&](int m, int v) {
      acc[m][v] = exp2v(acc[m][v]);
      store(probs + (r + m) * LD + c + v * VL, acc[m][v]);
    });
    if (t.row_keys)
      each<M, N>([&](int m, int v) {
        const vi keep = kept_lanes(t.row_keys[b.q0 + r + m],
                                   static_cast<uint32_t>(b.c0 + c + v * VL),
                                   static_cast<int32_t>(p.drop_below));
        store(probs + (r + m) * LD + c + v * VL, keep ? acc[m][v] : -acc[m][v]);
        acc[m][v] = keep ? acc[m][v] : vf{};
      });
    if (p.bf16) store_pairs_down<N>(acc, s.probs_down.data, r, c);
  });
}

// acc = probs * (acc kept and scaled - delta), and the probs of dropped keys become 0.
template <int N>
ALWAYS_INLINE void multiply_kept(const Problem& p, vf (&acc)[M][N], const float* delta,
                                 float* probs) {
  each<M, N>([&](int m, int v) {
    float* at = probs + m * LD + v * VL;
    const vf prob = load(at);
    const vi dropped = prob < vf{};
    const vf grad = dropped ? vf{} : acc[m][v] * splat(p.kept_scale);
    acc[m][v] = (dropped ? -prob : prob) * (grad - splat(delta[m]));
    store(at, dropped ? vf{} : prob);
  });
}

// grads = d loss / d (q . k * scale), plain = the same before the weight, product *= plain;
// grad_key += the sums of plain over the queries.
template <bool WEIGHTED, bool KEYED>
void score_grads(const Problem& p, BackwardScratch& s, const Terms& t, const Block& b) {
  float* probs = s.probs.data;
  float *grads = s.grads.data, *plain = s.plain.data, *product = s.product.data;
  each_tile(p, t, b, [&](auto n, auto, int64_t r, int64_t c) {
    constexpr int N = decltype(n)::value;
    const long shift = p.k_len - 1 - (b.first_pos + r) + b.c0 + c;
    const float* delta = s.delta.data + b.q0 + r;
    vf acc[M][N];
    each<M, N>([&](int m, int v) { acc[m][v] = t.row_keys ? vf{} : splat(-delta[m]); });
    multiply_rows<N>(p, acc, s.grad_out.data, b.q0 + r, s.value_panels.data + c * p.dim);
    if (t.row_keys)
      multiply_kept<N>(p, acc, delta, probs + r * LD + c);
    else
      each<M, N>([&](int m, int v) { acc[m][v] *= load(probs + (r + m) * LD + c + v * VL); });
    if (t.row_scale)
      each<M, 1>([&](int m, int) {
        if (p.grad_row_scale) {
          const float* unscaled = s.unscaled.data + (r + m) * LD + c;
          vf total = {};
          for (int v = 0; v < N; ++v) total += acc[m][v] * load(unscaled + v * VL);
          s.grad_row_scale.data[b.q0 + r + m] += sum(total) * LN2;
        }
        for (int v = 0; v < N; ++v) acc[m][v] *= splat(s.row_scale.data[b.q0 + r + m]);
      });
    if constexpr (KEYED) {
      vf total[N];
      for (int v = 0; v < N; ++v) total[v] = load(s.grad_key.data + c + v * VL);
      each<M, N>([&](int m, int v) { total[v] += acc[m][v]; });
      for (int v = 0; v < N; ++v) store(s.grad_key.data + c + v * VL, total[v]);
    }
    each<M, N>([&](int m, int v) {
      const long at = (r + m) * LD + c + v * VL, d = shift - m + v * VL;
      vf grad = acc[m][v];
      if (WEIGHTED) {
        store(plain + at, grad);
        store(product + at, grad * load(product + at));
        grad *= load(t.weight + d);
      }
      store(grads + at, grad);
      acc[m][v] = grad;
    });
    if (p.bf16) {
      store_pairs_down<N>(acc, s.grads_down.data, r, c);
      store_pairs_across<N>(acc, s.grads_across.data, r, c);
    }
  });
}

template <bool WEIGHTED>
void clear_block_outside(const Problem& p, BackwardScratch& s, const Terms& t, const Block& b) {
  for (int64_t r = 0; r < b.rows; r += M) {
    const Span span = span_of(p, t, b, r);
    if (span.begin == 0 && span.end == C) continue;
    clear_outside(s.grads.data, r, M, span);
    if (p.bf16) {
      clear_outside(s.probs_down.data, r / 2, M / 2, span);
      clear_outside(s.grads_down.data, r / 2, M / 2, span);
    } else {
      clear_outside(s.probs.data, r, M, span);
    }
    if (WEIGHTED) {
      clear_outside(s.plain.data, r, M, span);
      clear_outside(s.product.data, r, M, span);
    }
  }
}

// out[c] += sum over rows of block[r][c] * right[r]: the transposed product, by tiles of keys.
void multiply_transposed(const Problem& p, const Terms& t, const Block& b, const float* block,
                         const float* right, float* out) {
  for (int64_t c = 0; c < C; c += M) {
    const int64_t first = std::max<int64_t>(0, b.c0 + c - b.first_pos);  // earlier rows see none
    int64_t last = std::min(b.rows, b.c0 + c + M - 1 + p.window - b.first_pos);
    if (t.first_key)
      while (first < last && t.first_key[b.q0 + last - 1] > b.c0 + c + M - 1) --last;
    if (first >= last) continue;
    if (p.bf16)  // the rows that fill up a pair hold zeros
      accumulate<true>(block + first / 2 * LD + c, 1, LD, right + first / 2 * p.dim, p.dim,
                       (last + 1) / 2 - first / 2, out + c * p.dim);
    else
      accumulate<false>(block + first * LD + c, 1, LD, right + first * p.dim, p.dim, last - first,
                        out + c * p.dim);
  }
}

// table[x] += sum over r of block[r][x + r]: along diagonals, by reading only. A vector of
// diagonals sticks out of a row by less than VL, into the zeros between rows.
void sum_diagonals(const float* block, int64_t rows, int64_t columns, float* table) {
  for (int64_t x = -(rows - 1) / VL * VL - VL; x < columns; x += VL) {
    const int64_t first = std::max<int64_t>(0, -x - VL + 1), last = std::min(rows, C - x);
    vf even = {}, odd = {};
    int64_t r = first;
    for (; r + 1 < last; r += 2) {
      even += load(block + r * LD + x + r);
      odd += load(block + (r + 1) * LD + x + r + 1);
    }
    if (r < last) even += load(block + r * LD + x + r);
    store(table + x, load(table + x) + even + odd);
  }
}

// Both gradients of the features. The skew is a stride of the left side, LD + 1 or LD - 1 from row
// to row; the zeros between the rows of the block fill the corners of a group of M rows or diagonals.
void feature_grads(const Problem& p, BackwardScratch& s, const Terms& t, const Block& b,
                   const float* grads, float* grad_table) {
  if (!is_near(p, b, 0, 0, C)) return;
  const long base = p.k_len - 1 - b.first_pos + b.c0;  // table index of row 0, column 0
  for (int64_t r = 0; r < b.rows; r += M) {  // row m, step k: column x + k + m, one distance
    const long end = std::min<long>(C, b.first_pos + r + M - b.c0);  // later keys: the future
    const long oldest = b.first_pos + r - p.extent + 1 - b.c0;       // earlier: beyond the extent
    const long x = std::max<long>(-(M - 1), oldest);
    if (end <= x) continue;
    accumulate<false>(grads + r * LD + x, LD + 1, 1, t.distance_across + (base - r + x) * p.rank,
                      p.rank, end - x, s.grad_features.data + (b.q0 + r) * p.rank);
  }
  if (!grad_table) return;
  const long columns = std::min<long>(C, b.first_pos - b.c0 + 1);
  const long first_x = std::max<long>(-(b.rows - 1), b.first_pos - p.extent + 1 - b.c0);
  for (long x = first_x; x < columns; x += M) {  // diagonals x .. x + M - 1: row k, column x + m + k
    const long first = std::max<long>(0, -x - M + 1), last = std::min<long>(b.rows, C - x);
    if (first >= last) continue;
    accumulate<false>(grads + first * LD + x + first, 1, LD + 1,
                      s.features.data + (b.q0 + first) * p.rank, p.rank, last - first,
                      grad_table + (base + x) * p.rank);
  }
}

template <bool WEIGHTED, bool KEYED>
void backward_block(const Problem& p, BackwardScratch& s, const Terms& t, const Sums& sums,
                    const Block& b) {
  const float *probs = s.probs.data, *grads = s.grads.data;
  recompute_probs<WEIGHTED, KEYED>(p, s, t, b);
  score_grads<WEIGHTED, KEYED>(p, s, t, b);
  clear_block_outside<WEIGHTED>(p, s, t, b);
  const int64_t row = b.q0 * p.dim, pair = b.q0 / 2 * p.dim;
  if (p.bf16) {
    multiply_transposed(p, t, b, s.probs_down.data, s.grad_out_pairs.data + pair, s.grad_v.data);
    multiply_transposed(p, t, b, s.grads_down.data, s.q_pairs.data + pair, s.grad_k.data);
    multiply_block(p, t, b, s.grads_across.data, s.keys.data, s.grad_q.data + row);
  } else {
    multiply_transposed(p, t, b, probs, s.grad_out.data + row, s.grad_v.data);
    multiply_transposed(p, t, b, grads, s.q.data + row, s.grad_k.data);
    multiply_block(p, t, b, grads, s.keys.data, s.grad_q.data + row);
  }
  const float* unweighted = WEIGHTED ? s.plain.data : s.grads.data;
  if (p.grad_query_features) feature_grads(p, s, t, b, unweighted, sums.distance_features);
  const long base = p.k_len - 1 - b.first_pos + b.c0;
  const int64_t columns = std::min<int64_t>(C, b.first_pos - b.c0 + 1);  // later: the future
  if (sums.bias) sum_diagonals(unweighted, b.rows, columns, sums.bias + base);
  if (WEIGHTED && sums.weight)
    sum_diagonals(s.product.data, b.rows, columns, sums.weight + base);
}

void write_rows(const Problem& p, const Rows& t, int64_t pair, int64_t heads, int64_t first,
                int64_t count, float scale, bool add, const float* in) {
  for (int64_t i = 0; i < count; ++i) {
    float* out = row_of(t, pair, heads, first + i);
    const float* row = in + i * p.dim;
    if (add)
      for (int64_t d = 0; d < p.dim; ++d) out[d] += row[d] * scale;
    else
      for (int64_t d = 0; d < p.dim; ++d) out[d] = row[d] * scale;
  }
}

// One head's share of the gradients, from blocks of keys part, part + parts, ...: each part then
// has its share of long and short columns. `add`: the head is not the first of its key head.
void backward_head(const Problem& p, BackwardScratch& s, int64_t bh, int64_t part, bool add) {
  const int64_t partial = (part * p.batch * p.heads + bh) * p.table_row, kv = kv_of(p, bh);
  const Terms t(p, bh);
  const Sums sums{p.grad_bias ? p.grad_bias + partial : nullptr,
                  p.grad_weight ? p.grad_weight + partial : nullptr,
                  p.grad_key_bias ? p.grad_key_bias + bh * p.k_len : nullptr,
                  p.grad_distance_features
                      ? p.grad_distance_features +
                            (part * p.batch * p.heads + bh) * p.feature_row * p.rank
                      : nullptr};
  const Pruner pruner(p, t, bh);
  const int64_t offset = p.k_len - p.q_len;
  load_pair(p, s, t, bh);
  if (part == 0 && p.grad_sink) sink_grads(p, s, t, bh);
  for (int64_t k_block = part; k_block * C < p.k_len; k_block += p.parts) {
    const int64_t c0 = k_block * C, count = std::min<int64_t>(C, p.k_len - c0);
    load_keys(p, s, kv, c0, count);
    const int64_t last_pos = std::min(p.k_len - 1, c0 + count - 1 + p.window - 1);
    for (int64_t q0 = std::max<int64_t>(0, c0 - offset) / R * R; q0 + offset <= last_pos; q0 += R) {
      if (t.first_key && t.first_key[q0] >= c0 + count) break;  // nor do later queries see them
      if (pruner.negligible(q0 / R, k_block)) continue;
      const Block block{q0, q0 + offset, std::min<int64_t>(R, p.q_len - q0), c0};
      with_flags(t.weight, t.key_bias, [&](auto weighted, auto keyed) {
        backward_block<weighted.value, keyed.value>(p, s, t, sums, block);
      });
    }
    write_rows(p, p.grad_k, kv, p.kv_heads, c0, count, p.bf16 ? p.scale * LN2 : LN2, add,
               s.grad_k.data);
    write_rows(p, p.grad_v, kv, p.kv_heads, c0, count, p.kept_scale, add, s.grad_v.data);
    if (sums.key_bias) std::copy(s.grad_key.data, s.grad_key.data + count, sums.key_bias + c0);
  }
  const int64_t batch_part = part * p.batch * p.heads + bh;
  write_rows(p, p.grad_q, batch_part, p.heads, 0, p.q_len, p.scale / LOG2E, false, s.grad_q.data);
  if (p.grad_query_features)
    std::copy_n(s.grad_features.data, p.q_len * p.rank,
                p.grad_query_features + batch_part * p.q_len * p.rank);
  if (p.grad_row_scale)
    std::copy_n(s.grad_row_scale.data, p.q_len, p.grad_row_scale + batch_part * p.q_len);
}

// All heads of one key head: they add to the same gradients.
void backward_task(const Problem& p, BackwardScratch& s, int64_t kv, int64_t part) {
  const int64_t group = p.heads / p.kv_heads;
  for (int64_t g = 0; g < group; ++g) backward_head(p, s, kv * group + g, part, g > 0);
}

}  // namespace
