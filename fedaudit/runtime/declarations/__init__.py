"""Holds what a method declares about its replies against what it does."""
