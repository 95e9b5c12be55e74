"""Benchmarks of whole train steps on GPU clusters that are not here: compiled by XLA:GPU, simulated, never run."""
