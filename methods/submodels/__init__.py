"""Sub-models: clients train parts of a wide model, cut to their size."""
