"""Averaging: clients train one architecture and the server averages what they send."""
