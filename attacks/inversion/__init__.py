"""Inversion: what did a client's records look like?"""
