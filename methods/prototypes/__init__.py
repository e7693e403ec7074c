"""Prototypes: clients share one vector for each class, or a shared head."""
