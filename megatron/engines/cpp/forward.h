// The forward pass of one block of queries: running softmax over blocks of keys.

#pragma once

#include "pruning.h"

namespace {

struct ForwardScratch {
  int64_t kv = -1;  // the pair whose keys and values are packed
  Buffer keys, values;
  Buffer q, out, pairs, features;
  ScoreBlock scores;
  float top[R], sum[R], row_scale[R];
  float tops[R * VL];
  int64_t tiles = 0, visited = 0;
  explicit ForwardScratch(const Problem& p)
      : keys((p.k_len + PANEL) * p.dim), values((p.k_len + 1) * p.dim),
        q(R * p.dim), out(R * p.dim), pairs(R * C / 2), features(R * p.rank) {}
};

// scores[r][c] and, lane by lane, each row's largest.
template <bool WEIGHTED, bool KEYED>
void score_block(const Problem& p, ForwardScratch& s, const Terms& t, const Block& b,
                 const float* keys) {
  std::fill(s.tops, s.tops + R * VL, -INFINITY);
  const float *bias = t.bias, *weight = t.weight, *q = s.q.data;
  float *scores = s.scores.data, *tops = s.tops;
  each_tile(p, t, b, [&](auto n, auto hidden, int64_t r, int64_t c) {
    constexpr int N = decltype(n)::value;
    const long shift = p.k_len - 1 - (b.first_pos + r) + b.c0 + c;
    vf acc[M][N];
    each<M, N>([&](int m, int v) { acc[m][v] = vf{}; });
    multiply_rows<N>(p, acc, q, r, keys + c * p.dim);
    if (p.bf16) each<M, N>([&](int m, int v) { acc[m][v] *= splat(p.scale); });
    each<M, N>([&](int m, int v) {
      const long at = shift - m + v * VL;
      if (WEIGHTED) acc[m][v] *= load(weight + at);
      acc[m][v] += load(bias + at);
    });
    if constexpr (KEYED) {
      const KeyTerms<N> key_terms(t, b, r, c);
      each<M, N>([&](int m, int v) { acc[m][v] += key_terms.at(m, v); });
    }
    if (is_near(p, b, r, c, N * VL))
      add_features<N>(p, acc, s.features.data + r * p.rank, t.distance_features + shift);
    if (t.row_scale) each<M, N>([&](int m, int v) { acc[m][v] *= splat(s.row_scale[r + m]); });
    if constexpr (hidden.value) hide_earlier<N>(p, t, b, r, c, acc);
    each<M, N>([&](int m, int v) { store(scores + (r + m) * LD + c + v * VL, acc[m][v]); });
    each<M, 1>([&](int m, int) {
      vf top = load(tops + (r + m) * VL);
#pragma GCC unroll 8
      for (int v = 0; v < N; ++v) top = larger(top, acc[m][v]);
      store(tops + (r + m) * VL, top);
    });
  });
}

// Running softmax: scores become exp2(score - top), and what was summed before is rescaled. The
// sum is of all scores, also of those that dropout then sets to 0.
template <bool DROPPED>
ALWAYS_INLINE void soften_block(const Problem& p, ForwardScratch& s, const Terms& t,
                                const Block& b) {
  for (int64_t r = 0; r < b.rows; ++r) {
    const Span span = span_of(p, t, b, r / M * M);
    if (span.begin >= span.end) continue;
    const float top = std::max(s.top[r], largest(load(s.tops + r * VL)));
    float* row = s.scores.data + r * LD;
    const auto kept = [&](vf e, int64_t c) {
      if constexpr (!DROPPED) return e;
      const vi keep = kept_lanes(t.row_keys[b.q0 + r], static_cast<uint32_t>(b.c0 + c),
                                 static_cast<int32_t>(p.drop_below));
      return keep ? e : vf{};
    };
    vf total = {};
    if (p.bf16) {
      float* pairs = s.pairs.data + r * (C / 2);
      for (int64_t c = span.begin; c < span.end; c += 2 * VL) {
        const vf low = exp2v(load(row + c) - splat(top));
        const vf high = c + VL < span.end ? exp2v(load(row + c + VL) - splat(top)) : vf{};
        store_pairs(pairs + c / 2, kept(low, c), kept(high, c + VL));
        total += low + high;
      }
    } else {
      for (int64_t c = span.begin; c < span.end; c += VL) {
        const vf e = exp2v(load(row + c) - splat(top));
        store(row + c, kept(e, c));
        total += e;
      }
    }
    if (top != s.top[r]) {
      const float shrink = std::exp2(s.top[r] - top);
      s.sum[r] *= shrink;
      for (int64_t d = 0; d < p.dim; d += VL)
        store(s.out.data + r * p.dim + d, load(s.out.data + r * p.dim + d) * splat(shrink));
      s.top[r] = top;
    }
    s.sum[r] += sum(total);
  }
}

// Nothing seen yet but the sink, whose share is in the sum alone. The top stays finite: a block
// may be all -inf for a row.
void start_rows(const Problem& p, ForwardScratch& s, const Terms& t, int64_t q0, int64_t rows) {
  std::fill(s.out.data, s.out.data + R * p.dim, 0.0f);
  std::fill(s.top, s.top + R, -1e30f);
  std::fill(s.sum, s.sum + R, 0.0f);
  if (!t.sink) return;
  for (int64_t r = 0; r < rows; ++r) {
    const float sink = t.sink[q0 + r];
    s.top[r] = sink > -1e30f || sink != sink ? sink : -1e30f;
    s.sum[r] = std::exp2(sink - s.top[r]);
  }
}

// A row that saw nothing gives 0, and 0 for a logsumexp: its probabilities are then 0, too.
void finish_rows(const Problem& p, const ForwardScratch& s, int64_t bh, int64_t q0, int64_t rows) {
  for (int64_t r = 0; r < rows; ++r) {
    float* out = row_of(p.out, bh, p.heads, q0 + r);
    const bool empty = s.sum[r] == 0.0f;
    const float inverse = empty ? 0.0f : p.kept_scale / s.sum[r];
    for (int64_t d = 0; d < p.dim; ++d) out[d] = s.out.data[r * p.dim + d] * inverse;
    p.lse[bh * p.q_len + q0 + r] = empty ? 0.0f : s.top[r] + std::log2(s.sum[r]);
  }
}

void forward_block(const Problem& p, ForwardScratch& s, const Pruner& pruner, const Terms& t,
                   int64_t bh, int64_t q_block) {
  const int64_t q0 = q_block * R, rows = std::min<int64_t>(R, p.q_len - q0);
  const int64_t first_pos = q0 + p.k_len - p.q_len, last_pos = first_pos + rows - 1;
  pack_rows(p, p.q, bh, p.heads, q0, rows, p.bf16 ? 1.0f : p.scale, s.q.data);
  if (p.bf16) to_pairs_across(s.q.data, R * p.dim, s.q.data);
  load_row_terms(p, t, q0, rows, R, s.features.data, s.row_scale);
  start_rows(p, s, t, q0, rows);
  int64_t oldest = std::max<int64_t>(0, first_pos - p.window + 1);
  if (t.first_key) oldest = std::max(oldest, t.first_key[q0]);
  for (int64_t k_block = oldest / C; k_block <= last_pos / C; ++k_block) {
    ++s.tiles;
    if (pruner.negligible(q_block, k_block)) continue;
    ++s.visited;
    const Block b{q0, first_pos, rows, k_block * C};
    with_flags(t.weight, t.key_bias, [&](auto weighted, auto keyed) {
      score_block<weighted.value, keyed.value>(p, s, t, b, s.keys.data + b.c0 * p.dim);
    });
    if (t.row_keys)
      soften_block<true>(p, s, t, b);
    else
      soften_block<false>(p, s, t, b);
    if (p.bf16)
      multiply_block(p, t, b, s.pairs.data, s.values.data + b.c0 / 2 * p.dim, s.out.data);
    else
      multiply_block(p, t, b, s.scores.data, s.values.data + b.c0 * p.dim, s.out.data);
  }
  finish_rows(p, s, bh, q0, rows);
}

// Blocks of queries part, part + parts, ...: each part then has its share of long and short rows.
void forward_task(const Problem& p, ForwardScratch& s, int64_t bh, int64_t part) {
  const int64_t kv = kv_of(p, bh);
  if (s.kv != kv) {
    pack_panels(p, p.k, kv, 0, p.k_len, s.keys.data);
    pack_rows(p, p.v, kv, p.kv_heads, 0, p.k_len, 1.0f, s.values.data);
    if (p.bf16) {
      std::fill_n(s.values.data + p.k_len * p.dim, p.dim, 0.0f);
      to_pairs_down(s.values.data, p.k_len, p.dim, p.dim, s.values.data);
    }
    s.kv = kv;
  }
  const Terms terms(p, bh);
  const Pruner pruner(p, terms, bh);
  for (int64_t q_block = part; q_block * R < p.q_len; q_block += p.parts)
    forward_block(p, s, pruner, terms, bh, q_block);
}

}  // namespace
