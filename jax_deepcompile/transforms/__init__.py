"""Rewrites of a local program that hide or save communication, one a file."""
