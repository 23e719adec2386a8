"""The paper again: suites of runs, locally or on Slurm; statistics, tables, figures, a report."""
