"""This room holds the gates of a test suite: a record or a measured round is held against a limit."""
