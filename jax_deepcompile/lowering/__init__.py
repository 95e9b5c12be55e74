"""From a local-view program to an XLA executable."""
