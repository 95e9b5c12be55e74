"""Experiments: typed configs addressed by name, and what ``deepcompile train`` does with them."""
