"""Distillation without data: the server makes the inputs itself, or clients share embeddings."""
