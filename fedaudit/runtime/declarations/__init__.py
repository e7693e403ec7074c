"""Tests what a method declares about its messages, and what its replies are made of."""
