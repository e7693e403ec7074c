"""References: what a method is compared with when nothing, or nothing useful, is shared."""
