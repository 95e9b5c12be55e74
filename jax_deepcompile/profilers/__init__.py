"""Measuring a step and the machine it runs on: each file measures one thing into a ``Profile``."""
