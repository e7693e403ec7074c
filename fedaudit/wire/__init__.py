"""The wire: the one road between the parties. What may travel, how it becomes bytes, and what was sent."""
