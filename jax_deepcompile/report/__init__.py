"""What was decided, for people to read."""
