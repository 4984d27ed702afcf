"""The suite. A regular package, so that no dependency's stray top-level `tests` can stand in for it."""
