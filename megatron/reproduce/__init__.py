"""Repeat the paper: suites of runs, started locally or through Slurm, and their report."""
