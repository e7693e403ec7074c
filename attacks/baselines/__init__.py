"""Blind baselines: guesses that saw no release. No attack should do worse."""
