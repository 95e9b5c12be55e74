"""What planning proposes; one strategy a file."""
