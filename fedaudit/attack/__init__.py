"""What an attack sees, what it claims, and how its claims are scored."""
