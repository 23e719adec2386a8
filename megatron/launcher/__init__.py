"""From a config to processes: hosts, ranks and launch plans."""
