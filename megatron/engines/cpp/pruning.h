// Which blocks of keys cannot matter to a block of queries, by true bounds on the scores.

#pragma once

#include <cmath>
#include <vector>

#include "problem.h"

namespace {

struct Pruner {  // true bounds on the scores of every (block of queries, block of keys)
  const Problem& p;
  const Terms& t;
  int64_t bh, kv;
  std::vector<float> q_norm, own_score, own_value, k_norm, v_norm, key_bias, least_scale;
  bool active;

  Pruner(const Problem& problem, const Terms& terms, int64_t pair)
      : p(problem), t(terms), bh(pair), kv(kv_of(problem, pair)),
        active(problem.bias_after != nullptr) {
    if (!active) return;
    const int64_t q_blocks = ceil_div(p.q_len, R), k_blocks = ceil_div(p.k_len, C);
    q_norm.assign(q_blocks, 0.0f);
    own_score.assign(q_blocks, INFINITY);
    own_value.assign(q_blocks, INFINITY);
    k_norm.assign(k_blocks, 0.0f);
    v_norm.assign(k_blocks, 0.0f);
    least_scale.assign(q_blocks, t.row_scale ? INFINITY : 1.0f);
    key_bias.assign(k_blocks, t.key_bias ? -INFINITY : 0.0f);
    measure_keys();
    measure_queries();
  }

  // A NaN, once met, stays: nothing is pruned against it.
  static float larger_or_nan(float so_far, float x) { return x > so_far || x != x ? x : so_far; }

  static float norm(const Input& x, int64_t n) { return std::sqrt(dot(x, x, n)); }

  Input key(int64_t j) const { return Input(p, p.k, kv, p.kv_heads, j); }
  Input value(int64_t j) const { return Input(p, p.v, kv, p.kv_heads, j); }

  void measure_keys() {
    for (int64_t j = 0; j < p.k_len; ++j) {
      const float k = norm(key(j), p.dim);
      const float v = norm(value(j), p.dim);
      k_norm[j / C] = larger_or_nan(k_norm[j / C], k);
      v_norm[j / C] = larger_or_nan(v_norm[j / C], v);
      if (t.key_bias)
        key_bias[j / C] = larger_or_nan(key_bias[j / C], t.key_bias[j] * LOG2E);
    }
  }

  void measure_queries() {
    const float own_bias = t.bias[p.k_len - 1];
    const float own_weight = t.weight ? t.weight[p.k_len - 1] : 1.0f;
    for (int64_t i = 0; i < p.q_len; ++i) {
      const int64_t pos = i + p.k_len - p.q_len, b = i / R;
      const Input q(p, p.q, bh, p.heads, i);
      const float raw = dot(q, key(pos), p.dim) * p.scale;
      const float own_key = t.key_bias ? t.key_bias[pos] * LOG2E : 0.0f;
      const float score =
          (t.weight ? raw * own_weight : raw) + own_bias + own_key + own_features(i);
      const float own = norm(value(pos), p.dim);
      const float size = norm(q, p.dim) * std::fabs(p.scale);
      if (t.row_scale) least_scale[b] = -larger_or_nan(-least_scale[b], -t.row_scale[i]);
      q_norm[b] = larger_or_nan(q_norm[b], size);
      own_score[b] = -larger_or_nan(-own_score[b], -score);
      own_value[b] = -larger_or_nan(-own_value[b], -own);
    }
  }

  float own_features(int64_t i) const {
    float total = 0.0f;
    for (int64_t f = 0; f < p.rank; ++f)
      total += t.query_features[i * p.rank + f] *
               t.distance_features[f * p.feature_row + p.k_len - 1];
    return total;
  }

  // No key of this block can move any output of these queries by more than rounding: each stays
  // below epsilon / keys of what the query's own key contributes (see pruning.py).
  bool negligible(int64_t q_block, int64_t k_block) const {
    if (!active) return false;
    const int64_t first_pos = q_block * R + p.k_len - p.q_len;
    const int64_t nearest = first_pos - (k_block * C + C - 1);
    if (nearest <= 0) return false;
    const int64_t at = bh % p.heads * p.k_len + nearest;
    const float weight = p.weight_after ? p.weight_after[at] : 1.0f;
    const float product = weight * q_norm[q_block] * k_norm[k_block];
    const float key = key_bias[k_block];  // -inf: a block of padding
    const float size = product + std::fabs(own_score[q_block]) + (key > -INFINITY ? std::fabs(key) : 0);
    const float slack = 0.01f + 1e-5f * size;
    // A key counts in the sum of the weights whatever its value. (NaN stays: not negligible.)
    const float values = std::log2(v_norm[k_block] / own_value[q_block]);
    const float most = p.bias_after[at] + key + product + slack;
    // The factor of the scores stretches the gap between them.
    const float gap = (p.prune_log2 + (values < 0.0f ? 0.0f : values)) / least_scale[q_block];
    return most < own_score[q_block] - gap;
  }
};

}  // namespace
