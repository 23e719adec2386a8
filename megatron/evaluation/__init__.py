"""How far does a model really extrapolate? Perplexity by length and position, retrieval, lm-eval.

Kept free of imports: lm-eval's plugin hook runs at every start of Python.
"""
