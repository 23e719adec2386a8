"""From a config to processes: hosts, ranks, launch plans, and what deepy.py does."""
