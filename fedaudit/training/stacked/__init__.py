"""Trains many models of one architecture at once, as a stack."""
