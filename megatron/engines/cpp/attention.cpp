// Causal attention with tables over distance on CPU: forward, and backward with table gradients.
//
// Plain C++ with a C interface, no torch headers: it compiles in seconds and is called by ctypes.
// All arithmetic is float32, scores are in base 2 (q and the bias come times log2 e).
//
// One task is a block of R queries (forward) or a list of blocks of C keys (backward) of one
// (batch, head) pair; a task's data stays in the L2 cache, a product's right side in L1. Every
// product is M x (N vectors) of registers. Causality and the window are -inf in the table, which
// is stored by rising key (so reversed), and blocks that are all -inf are not visited.

#include "backward.h"
#include "forward.h"

extern "C" void attention_forward(Problem* problem) {
  const Problem& p = *problem;
  const int64_t tasks = p.batch * p.heads * p.parts;
  int64_t tiles = 0, visited = 0;
#pragma omp parallel num_threads(p.threads) reduction(+ : tiles, visited)
  {
    const NoDenormals guard;
    ForwardScratch scratch(p);
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < tasks; ++task)
      forward_task(p, scratch, task / p.parts, task % p.parts);
    tiles += scratch.tiles;
    visited += scratch.visited;
  }
  problem->tiles = tiles;
  problem->tiles_visited = visited;
}

extern "C" void attention_backward(Problem* problem) {
  const Problem& p = *problem;
  const int64_t tasks = p.batch * p.kv_heads * p.parts;
#pragma omp parallel num_threads(p.threads)
  {
    const NoDenormals guard;
    BackwardScratch scratch(p);
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < tasks; ++task)
      backward_task(p, scratch, task / p.parts, task % p.parts);
  }
}

extern "C" int64_t attention_problem_size() { return sizeof(Problem); }
extern "C" int64_t attention_vector_length() { return VL; }
extern "C" int64_t attention_has_bf16() { return HAS_BF16; }
