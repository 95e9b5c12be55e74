"""Batches of random tokens and images, the same every time."""

from __future__ import annotations

import numpy as np


def tokens(examples: int, length: int, vocabulary: int) -> np.ndarray:
    """int32[examples, length + 1]: one token more than is predicted."""
    return np.random.default_rng(0).integers(0, vocabulary, (examples, length + 1), np.int32)


def images(examples: int, pixels: int, classes: int) -> dict[str, np.ndarray]:
    """``image`` float32[examples, pixels, pixels, 3] and ``label`` int32[examples]."""
    random = np.random.default_rng(0)
    return {
        "image": random.standard_normal((examples, pixels, pixels, 3), np.float32),
        "label": random.integers(0, classes, examples, np.int32),
    }
