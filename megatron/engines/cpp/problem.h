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
constexpr long LD = C + VL;  // row of a block of scores; the VL zeros between rows pad diagonals
constexpr long CHUNK = 96;   // keys of a product that stay in L1

static_assert(R % M == 0 && C % M == 0 && C % PANEL == 0 && CHUNK % M == 0, "block sizes");

}  // namespace

extern "C" {

struct Rows {  // a [batch, heads, length, head_dim] tensor; the last stride is 1
  float* data;
  int64_t batch, head, row;  // strides
};

struct Problem {
  int64_t batch, heads, q_len, k_len, dim;  // dim is a multiple of VL
  int64_t window;                           // keys a query sees at most (k_len: all)
  int64_t threads, parts;  // parts: how many tasks share a (batch, head) pair
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
  int64_t table_row;
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

struct ScoreBlock {  // R rows of C scores, with VL zeros before, between and after the rows
  Buffer memory;
  float* data;
  explicit ScoreBlock(bool used = true) : memory(used ? R * LD + VL : 0), data(memory.data + VL) {
    if (used) std::memset(memory.data, 0, (R * LD + VL) * sizeof(float));
  }
};

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

const float* row_of(const Rows& t, int64_t bh, int64_t heads, int64_t i) {
  return t.data + bh / heads * t.batch + bh % heads * t.head + i * t.row;
}
float* row_of_mut(const Rows& t, int64_t bh, int64_t heads, int64_t i) {
  return const_cast<float*>(row_of(t, bh, heads, i));
}

void pack_rows(const Problem& p, const Rows& t, int64_t bh, int64_t first, int64_t count,
               float scale, float* out) {
  for (int64_t i = 0; i < count; ++i) {
    const float* in = row_of(t, bh, p.heads, first + i);
    for (int64_t d = 0; d < p.dim; ++d) out[i * p.dim + d] = in[d] * scale;
  }
}

// Keys [first, first + count) as panels [PANEL keys across, dim down]; missing keys are zero.
void pack_panels(const Problem& p, const Rows& t, int64_t bh, int64_t first, int64_t count,
                 float* out) {
  for (int64_t c = 0; c < count; c += PANEL) {
    float* panel = out + c * p.dim;
    for (int64_t j = 0; j < PANEL; ++j) {
      const bool there = c + j < count;
      const float* in = there ? row_of(t, bh, p.heads, first + c + j) : nullptr;
      for (int64_t d = 0; d < p.dim; ++d) panel[d * PANEL + j] = there ? in[d] : 0.0f;
    }
  }
}

// The part of a block of keys that a tile of M queries sees: [begin, end), begin on a panel.
struct Span {
  int64_t begin, end;
};
Span span_of(const Problem& p, int64_t first_pos, int64_t c0) {
  const int64_t oldest = std::max<int64_t>(0, first_pos - p.window + 1 - c0);
  const int64_t end = std::min<int64_t>(C, std::min(first_pos + M, p.k_len) - c0);
  return {std::min(oldest / PANEL * PANEL, C), std::max<int64_t>(end, 0)};
}

// out[r] += block[r][span] * right, for tiles of rows; right is [C, dim].
void multiply_block(const Problem& p, const float* block, const float* right, float* out,
                    int64_t first_pos, int64_t c0, int64_t rows) {
  for (int64_t k = 0; k < C; k += CHUNK) {
    for (int64_t r = 0; r < rows; r += M) {
      const Span span = span_of(p, first_pos + r, c0);
      const int64_t begin = std::max(k, span.begin), end = std::min(k + CHUNK, span.end);
      if (begin < end)
        accumulate(block + r * LD + begin, LD, 1, right + begin * p.dim, p.dim, end - begin,
                   out + r * p.dim);
    }
  }
}

}  // namespace
