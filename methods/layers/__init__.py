"""Layers: clients share some layers of their models, and keep the others."""
