"""Evaluation: perplexity by length and position, retrieval, induction, RULER, lm-eval."""
