"""How far does a model really extrapolate? Perplexity by length and position, recall, lm-eval."""
