// The backward pass of one (batch, head) pair: blocks of keys outside, blocks of queries inside.
//
// Probabilities are computed again from the saved logsumexp; five products a block. The gradient
// of the table is the sum along the diagonals of the gradient of the scores.

#pragma once

#include "pruning.h"

namespace {

constexpr float LN2 = 0.69314718f, LOG2E = 1.44269504f;

struct BackwardScratch {
  int64_t q_rows;
  Buffer q, grad_out, grad_q, lse, delta;                // the whole length
  Buffer keys, key_panels, value_panels, grad_k, grad_v;  // one block of keys
  ScoreBlock probs, grads, plain, product;
  explicit BackwardScratch(const Problem& p)
      : q_rows(ceil_div(p.q_len, R) * R), q(q_rows * p.dim), grad_out(q_rows * p.dim),
        grad_q(q_rows * p.dim), lse(q_rows), delta(q_rows), keys(C * p.dim),
        key_panels(C * p.dim), value_panels(C * p.dim), grad_k(C * p.dim), grad_v(C * p.dim),
        plain(p.weight != nullptr), product(p.weight != nullptr) {}
};

struct Tables {  // of one head, at the reversed table's start
  const float *bias, *weight;
  float *grad_bias, *grad_weight;
};

struct Block {  // of scores: rows queries from q0, keys from c0
  int64_t q0, first_pos, rows, c0;
};

void load_pair(const Problem& p, BackwardScratch& s, int64_t bh) {
  pack_rows(p, p.q, bh, 0, p.q_len, p.scale, s.q.data);
  pack_rows(p, p.grad_out, bh, 0, p.q_len, 1.0f, s.grad_out.data);
  std::memset(s.grad_q.data, 0, s.q_rows * p.dim * sizeof(float));
  for (int64_t i = 0; i < p.q_len; ++i) {
    s.lse.data[i] = p.lse[bh * p.q_len + i];
    s.delta.data[i] = dot(row_of(p.out, bh, p.heads, i), s.grad_out.data + i * p.dim, p.dim);
  }
}

void load_keys(const Problem& p, BackwardScratch& s, int64_t bh, int64_t c0, int64_t count) {
  const size_t bytes = C * p.dim * sizeof(float);
  std::memset(s.keys.data, 0, bytes);
  std::memset(s.grad_k.data, 0, bytes);
  std::memset(s.grad_v.data, 0, bytes);
  pack_rows(p, p.k, bh, c0, count, 1.0f, s.keys.data);
  pack_panels(p, p.k, bh, c0, count, s.key_panels.data);
  pack_panels(p, p.v, bh, c0, count, s.value_panels.data);
}

// Zeros in the parts of a row of tiles that are not visited.
void clear_outside(float* block, int64_t r, Span span) {
  const int64_t end = span.begin < span.end ? ceil_div(span.end, VL) * VL : span.begin;
  for (int64_t m = r; m < r + M; ++m) {
    std::fill(block + m * LD, block + m * LD + span.begin, 0.0f);
    std::fill(block + m * LD + end, block + m * LD + C, 0.0f);
  }
}

template <class F>
void each_tile(const Problem& p, const Block& b, F f) {
  for (int64_t c = 0; c < C; c += PANEL) {
    for (int64_t r = 0; r < b.rows; r += M) {
      const Span span = span_of(p, b.first_pos + r, b.c0);
      if (c < span.begin || c >= span.end) continue;
      with_vectors(ceil_div(std::min<int64_t>(span.end - c, PANEL), VL),
                   [&](auto n) { f(n, r, c); });
    }
  }
}

// probs = exp2(score - logsumexp); product = the unweighted scores, if there are weights.
template <bool WEIGHTED>
void recompute_probs(const Problem& p, BackwardScratch& s, const Tables& t, const Block& b) {
  float *probs = s.probs.data, *product = s.product.data;
  each_tile(p, b, [&](auto n, int64_t r, int64_t c) {
    constexpr int N = decltype(n)::value;
    const long shift = p.k_len - 1 - (b.first_pos + r) + b.c0 + c;
    const float* lse = s.lse.data + b.q0 + r;
    vf acc[M][N];
    each<M, N>([&](int m, int v) {
      acc[m][v] = WEIGHTED ? vf{} : load(t.bias + shift - m + v * VL) - splat(lse[m]);
    });
    multiply<N>(acc, s.q.data + (b.q0 + r) * p.dim, p.dim, 1, s.key_panels.data + c * p.dim, PANEL,
                p.dim);
    each<M, N>([&](int m, int v) {
      const long at = (r + m) * LD + c + v * VL, d = shift - m + v * VL;
      if (WEIGHTED) {
        store(product + at, acc[m][v] * splat(LN2));  // back to base e
        acc[m][v] = acc[m][v] * load(t.weight + d) + (load(t.bias + d) - splat(lse[m]));
      }
      store(probs + at, exp2v(acc[m][v]));
    });
  });
}

// grads = d loss / d (q . k * scale), plain = the same before the weight, product *= plain.
template <bool WEIGHTED>
void score_grads(const Problem& p, BackwardScratch& s, const Tables& t, const Block& b) {
  const float* probs = s.probs.data;
  float *grads = s.grads.data, *plain = s.plain.data, *product = s.product.data;
  each_tile(p, b, [&](auto n, int64_t r, int64_t c) {
    constexpr int N = decltype(n)::value;
    const long shift = p.k_len - 1 - (b.first_pos + r) + b.c0 + c;
    const float* delta = s.delta.data + b.q0 + r;
    vf acc[M][N];
    each<M, N>([&](int m, int v) { acc[m][v] = splat(-delta[m]); });
    multiply<N>(acc, s.grad_out.data + (b.q0 + r) * p.dim, p.dim, 1,
                s.value_panels.data + c * p.dim, PANEL, p.dim);
    each<M, N>([&](int m, int v) {
      const long at = (r + m) * LD + c + v * VL, d = shift - m + v * VL;
      vf grad = acc[m][v] * load(probs + at);
      if (WEIGHTED) {
        store(plain + at, grad);
        store(product + at, grad * load(product + at));
        grad *= load(t.weight + d);
      }
      store(grads + at, grad);
    });
  });
}

template <bool WEIGHTED>
void clear_block_outside(const Problem& p, BackwardScratch& s, const Block& b) {
  for (int64_t r = 0; r < b.rows; r += M) {
    const Span span = span_of(p, b.first_pos + r, b.c0);
    if (span.begin == 0 && span.end == C) continue;
    clear_outside(s.probs.data, r, span);
    clear_outside(s.grads.data, r, span);
    if (WEIGHTED) {
      clear_outside(s.plain.data, r, span);
      clear_outside(s.product.data, r, span);
    }
  }
}

// out[c] += sum over rows of block[r][c] * right[r]: the transposed product, by tiles of keys.
void multiply_transposed(const Problem& p, const float* block, const float* right, float* out,
                         const Block& b) {
  for (int64_t c = 0; c < C; c += M) {
    const int64_t first = std::max<int64_t>(0, b.c0 + c - b.first_pos);  // earlier rows see none
    const int64_t last = std::min(b.rows, b.c0 + c + M - 1 + p.window - b.first_pos);
    if (first < last)
      accumulate(block + first * LD + c, 1, LD, right + first * p.dim, p.dim, last - first,
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

template <bool WEIGHTED>
void backward_block(const Problem& p, BackwardScratch& s, const Tables& t, const Block& b) {
  const float *probs = s.probs.data, *grads = s.grads.data;
  recompute_probs<WEIGHTED>(p, s, t, b);
  score_grads<WEIGHTED>(p, s, t, b);
  clear_block_outside<WEIGHTED>(p, s, b);
  multiply_transposed(p, probs, s.grad_out.data + b.q0 * p.dim, s.grad_v.data, b);
  multiply_transposed(p, grads, s.q.data + b.q0 * p.dim, s.grad_k.data, b);
  multiply_block(p, grads, s.keys.data, s.grad_q.data + b.q0 * p.dim, b.first_pos, b.c0, b.rows);
  const long base = p.k_len - 1 - b.first_pos + b.c0;
  const int64_t columns = std::min<int64_t>(C, b.first_pos - b.c0 + 1);  // later: the future
  if (t.grad_bias)
    sum_diagonals(WEIGHTED ? s.plain.data : s.grads.data, b.rows, columns, t.grad_bias + base);
  if (WEIGHTED && t.grad_weight)
    sum_diagonals(s.product.data, b.rows, columns, t.grad_weight + base);
}

void write_rows(const Problem& p, const Rows& t, int64_t bh, int64_t first, int64_t count,
                float scale, const float* in) {
  for (int64_t i = 0; i < count; ++i) {
    float* out = row_of_mut(t, bh, p.heads, first + i);
    for (int64_t d = 0; d < p.dim; ++d) out[d] = in[i * p.dim + d] * scale;
  }
}

// Blocks of keys part, part + parts, ...: each part then has its share of long and short columns.
template <bool WEIGHTED>
void backward_task(const Problem& p, BackwardScratch& s, int64_t bh, int64_t part) {
  const int64_t head = bh % p.heads * p.table_row;
  const int64_t partial = (part * p.batch * p.heads + bh) * p.table_row;
  const Tables t{p.bias + head, WEIGHTED ? p.weight + head : nullptr,
                 p.grad_bias ? p.grad_bias + partial : nullptr,
                 p.grad_weight ? p.grad_weight + partial : nullptr};
  const Pruner pruner(p, bh);
  const int64_t offset = p.k_len - p.q_len;
  load_pair(p, s, bh);
  for (int64_t k_block = part; k_block * C < p.k_len; k_block += p.parts) {
    const int64_t c0 = k_block * C, count = std::min<int64_t>(C, p.k_len - c0);
    load_keys(p, s, bh, c0, count);
    const int64_t last_pos = std::min(p.k_len - 1, c0 + count - 1 + p.window - 1);
    for (int64_t q0 = std::max<int64_t>(0, c0 - offset) / R * R; q0 + offset <= last_pos; q0 += R) {
      if (pruner.negligible(q0 / R, k_block)) continue;
      const Block block{q0, q0 + offset, std::min<int64_t>(R, p.q_len - q0), c0};
      backward_block<WEIGHTED>(p, s, t, block);
    }
    write_rows(p, p.grad_k, bh, c0, count, LN2, s.grad_k.data);
    write_rows(p, p.grad_v, bh, c0, count, 1.0f, s.grad_v.data);
  }
  const int64_t batch_part = part * p.batch * p.heads + bh;
  write_rows(p, p.grad_q, batch_part, 0, p.q_len, p.scale / LOG2E, s.grad_q.data);
}

}  // namespace
