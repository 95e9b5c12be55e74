"""The program being compiled: its types, how to walk it, and what must always hold."""
