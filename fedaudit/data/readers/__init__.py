"""Reads data sets: one module a format."""
