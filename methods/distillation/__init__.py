"""Distillation: clients learn from each other's outputs on public or their own records."""
