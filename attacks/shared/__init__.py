"""Parts that several attacks use."""
