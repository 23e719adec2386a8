"""The benchmarks behind tools/benchmark.py; each module has `add_arguments` and `run`."""
