"""Fully sharded training of ordinary JAX train steps."""
