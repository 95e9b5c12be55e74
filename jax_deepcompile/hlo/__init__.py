"""What XLA compiled, read from its text."""
