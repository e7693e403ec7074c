"""Parts that methods of several families use."""
