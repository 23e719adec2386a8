"""Reproduce the paper: suites of runs, locally or on Slurm; statistics, tables, figures, report."""
