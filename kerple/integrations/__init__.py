"""Our attention engines in other libraries' models."""
