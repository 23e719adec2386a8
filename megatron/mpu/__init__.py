"""Tensor parallelism: process groups, collectives with gradients, and the split layers."""
