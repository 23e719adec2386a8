"""The parts of tools/gpu_check.py: each runs on any device and returns findings."""
