"""One profile for all processes of a run."""

from __future__ import annotations

import jax
import numpy as np
from jax.experimental import multihost_utils

from jax_deepcompile.costs.profile import Profile


def of_first_process(profile: Profile | None) -> Profile | None:
    """The profile of process 0, in every process.

    What each measures differs a little, and programs planned from different times would wait for each other forever.
    """
    if jax.process_count() == 1:
        return profile
    text = np.frombuffer((profile.to_json() if profile else "").encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.array(text.size)))
    text = text if jax.process_index() == 0 else np.zeros(size, np.uint8)
    received = bytes(np.asarray(multihost_utils.broadcast_one_to_all(text))).decode()
    return Profile.from_json(received, "what process 0 sent") if received else None
