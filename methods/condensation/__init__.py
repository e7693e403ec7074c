"""Condensation: clients share small synthetic data sets and class statistics."""
