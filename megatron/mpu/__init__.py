"""Tensor parallelism: groups, the collectives that carry gradients, and the split layers."""
