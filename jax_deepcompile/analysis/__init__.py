"""What a program does, found by looking at it."""
