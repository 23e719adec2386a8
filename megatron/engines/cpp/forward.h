// The forward pass of one block of queries: running softmax over blocks of keys.

#pragma once

#include "pruning.h"

namespace {

struct ForwardScratch {
  int64_t pair = -1;  // whose keys and values are packed
  Buffer keys, values;
  Buffer q, out;
  ScoreBlock scores;
  float top[R], sum[R];
  float tops[R * VL];
  int64_t tiles = 0, visited = 0;
  explicit ForwardScratch(const Problem& p)
      : keys((p.k_len + PANEL) * p.dim), values(p.k_len * p.dim), q(R * p.dim), out(R * p.dim) {}
};

// scores[r][c] and, lane by lane, each row's largest.
template <bool WEIGHTED>
void score_block(const Problem& p, ForwardScratch& s, const float* keys, const float* bias,
                 const float* weight, int64_t first_pos, int64_t c0, int64_t rows) {
  std::fill(s.tops, s.tops + R * VL, -INFINITY);
  for (int64_t c = 0; c < C; c += PANEL) {
    for (int64_t r = 0; r < rows; r += M) {
      const Span span = span_of(p, first_pos + r, c0);
      if (c < span.begin || c >= span.end) continue;
      const long shift = p.k_len - 1 - (first_pos + r) + c0 + c;
      with_vectors(ceil_div(std::min<int64_t>(span.end - c, PANEL), VL), [&](auto n) {
        constexpr int N = decltype(n)::value;
        vf acc[M][N];
        each<M, N>([&](int m, int v) { acc[m][v] = vf{}; });
        multiply<N>(acc, s.q.data + r * p.dim, p.dim, 1, keys + c * p.dim, PANEL, p.dim);
        each<M, N>([&](int m, int v) {
          const long at = shift - m + v * VL;
          if (WEIGHTED) acc[m][v] *= load(weight + at);
          acc[m][v] += load(bias + at);
          store(s.scores.data + (r + m) * LD + c + v * VL, acc[m][v]);
          float* top = s.tops + (r + m) * VL;
          store(top, larger(load(top), acc[m][v]));
        });
      });
    }
  }
}

// Running softmax: scores become exp2(score - top), and what was summed before is rescaled.
void soften_block(const Problem& p, ForwardScratch& s, int64_t first_pos, int64_t c0,
                  int64_t rows) {
  for (int64_t r = 0; r < rows; ++r) {
    const Span span = span_of(p, first_pos + r / M * M, c0);
    if (span.begin >= span.end) continue;
    const float top = std::max(s.top[r], largest(load(s.tops + r * VL)));
    float* row = s.scores.data + r * LD;
    vf total = {};
    for (int64_t c = span.begin; c < span.end; c += VL) {
      const vf e = exp2v(load(row + c) - splat(top));
      store(row + c, e);
      total += e;
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

void finish_rows(const Problem& p, const ForwardScratch& s, int64_t bh, int64_t q0, int64_t rows) {
  for (int64_t r = 0; r < rows; ++r) {
    float* out = row_of_mut(p.out, bh, p.heads, q0 + r);
    const float inverse = 1.0f / s.sum[r];
    for (int64_t d = 0; d < p.dim; ++d) out[d] = s.out.data[r * p.dim + d] * inverse;
    p.lse[bh * p.q_len + q0 + r] = s.top[r] + std::log2(s.sum[r]);
  }
}

void forward_block(const Problem& p, ForwardScratch& s, const Pruner& pruner, int64_t bh,
                   int64_t q_block) {
  const int64_t q0 = q_block * R, rows = std::min<int64_t>(R, p.q_len - q0);
  const int64_t first_pos = q0 + p.k_len - p.q_len, last_pos = first_pos + rows - 1;
  const float* bias = p.bias + bh % p.heads * p.table_row;
  const float* weight = p.weight ? p.weight + bh % p.heads * p.table_row : nullptr;
  pack_rows(p, p.q, bh, q0, rows, p.scale, s.q.data);
  std::fill(s.out.data, s.out.data + R * p.dim, 0.0f);
  std::fill(s.top, s.top + R, -1e30f);  // finite: a block may be all -inf for a row
  std::fill(s.sum, s.sum + R, 0.0f);
  const int64_t oldest = std::max<int64_t>(0, first_pos - p.window + 1);
  for (int64_t b = oldest / C; b <= last_pos / C; ++b) {
    ++s.tiles;
    if (pruner.negligible(q_block, b)) continue;
    ++s.visited;
    const float* keys = s.keys.data + b * C * p.dim;
    if (weight)
      score_block<true>(p, s, keys, bias, weight, first_pos, b * C, rows);
    else
      score_block<false>(p, s, keys, bias, weight, first_pos, b * C, rows);
    soften_block(p, s, first_pos, b * C, rows);
    multiply_block(p, s.scores.data, s.values.data + b * C * p.dim, s.out.data, first_pos, b * C,
                   rows);
  }
  finish_rows(p, s, bh, q0, rows);
}

// Blocks of queries part, part + parts, ...: each part then has its share of long and short rows.
void forward_task(const Problem& p, ForwardScratch& s, int64_t bh, int64_t part) {
  if (s.pair != bh) {
    pack_panels(p, p.k, bh, 0, p.k_len, s.keys.data);
    pack_rows(p, p.v, bh, 0, p.k_len, 1.0f, s.values.data);
    s.pair = bh;
  }
  const Pruner pruner(p, bh);
  for (int64_t q_block = part; q_block * R < p.q_len; q_block += p.parts)
    forward_block(p, s, pruner, bh, q_block);
}

}  // namespace
