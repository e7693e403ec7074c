"""Checks of a run folder for somebody who does not trust its author: one module for each kind of check."""
