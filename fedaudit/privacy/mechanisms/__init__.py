"""The mechanisms: one file for each. `base` says what a mechanism has to know, and finds them by name."""
