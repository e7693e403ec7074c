"""Sums of clients' replies: plain means, secure aggregation, and noise on sums."""
