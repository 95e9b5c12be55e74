"""One profile for all processes of a run."""

from __future__ import annotations

from jax_deepcompile.costs.profile import Profile
from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.runtime.processes import processes_of


def of_first_process(profile: Profile | None, mesh: AnyMesh) -> Profile | None:
    """The profile of the first process of ``mesh``, in every process.

    What each measures differs a little, and programs planned from different times would wait for each other forever.
    """
    processes = processes_of(mesh)
    if processes.is_alone:
        return profile
    said = processes.first_says(profile.to_json() if profile and processes.is_first else "")
    return Profile.from_json(said, "what the first process said") if said else None
