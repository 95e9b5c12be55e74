"""What ``shard`` may be asked for: checked where it is asked, not where it first goes wrong."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from jax.sharding import AbstractMesh, Mesh

from jax_deepcompile import errors
from jax_deepcompile.costs.profile import Profile
from jax_deepcompile.frontend.meshes import Cluster
from jax_deepcompile.planner.limits import refuse_unknown
from jax_deepcompile.planner.plan import Plan
from jax_deepcompile.planner.selection import Selection
from jax_deepcompile.planner.session import PlanOptions
from jax_deepcompile.planner.strategy import Strategy

Microbatches = int | Literal["auto"] | range | Sequence[int]
"""How many, or those to choose from."""


@dataclass(frozen=True)
class StepOptions(PlanOptions):
    """What ``shard`` was asked for, of which the planner has its part; see there."""

    mesh: Any = None
    state_argnums: int | Sequence[int] | None = None
    batch_argnums: int | Sequence[int] | None = None
    fsdp_axes: str | Sequence[str] = "fsdp"
    data_axes: str | Sequence[str] = "data"
    microbatches: Microbatches = 1
    donate: bool = True

    def __post_init__(self) -> None:
        """Raises the errors of ``shard`` for what cannot be meant; those of the mesh come later."""
        for name, (expected, is_legal) in _OPTIONS.items():
            if not is_legal(getattr(self, name)):
                raise errors.OptionTypeError(name, expected, getattr(self, name))
        if not _are_microbatches(self.microbatches):
            raise errors.MicrobatchCountError(self.microbatches)
        refuse_unknown(self.memory_limit)
        refuse_unknown(self.host_memory_limit, "host_memory_limit")
        Selection.of(self.passes)

    def arguments(self) -> dict[str, Any]:
        """By name, as ``shard`` was given them."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _are_microbatches(value: Any) -> bool:
    several = value if isinstance(value, range | tuple | list) else [value]
    return (isinstance(value, str) and value == "auto") or (
        len(several) > 0 and all(_is_count(each) and each > 0 for each in several)
    )


def _all_of(value: Any, is_one: Callable[[Any], bool]) -> bool:
    return isinstance(value, tuple | list) and all(map(is_one, value))


def _are_positions(value: Any) -> bool:
    return value is None or _is_count(value) or (_all_of(value, _is_count) and len(set(value)) == len(value))


def _are_names(value: Any) -> bool:
    is_tuple = _all_of(value, lambda name: isinstance(name, str))
    return isinstance(value, str) or (is_tuple and len(set(value)) == len(value))


def _are_passes(value: Any) -> bool:
    if isinstance(value, str):
        return all(name.strip().startswith("-") for name in value.split(","))
    return value is None or _all_of(value, lambda each: isinstance(each, Strategy) and not isinstance(each, type))


def _is_path(value: Any) -> bool:
    try:
        return value is None or (isinstance(os.fspath(value), str) and b"\0" not in (os.fsencode(value) or b"\0"))
    except (TypeError, UnicodeEncodeError):
        return False


_POSITIONS = (
    "the position of an argument, a tuple of different ones, or None for the package to find out",
    _are_positions,
)
_OPTIONS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "mesh": (
        "a jax.sharding.Mesh, a shape such as {'data': 2, 'fsdp': 4}, a cluster such as "
        "deepcompile.targets.h100(nodes=4), or None for all devices",
        lambda value: value is None or isinstance(value, Mesh | AbstractMesh | Mapping | Cluster),
    ),
    "state_argnums": _POSITIONS,
    "batch_argnums": _POSITIONS,
    "fsdp_axes": (
        "the name of a mesh axis, or a tuple of at least one, all different",
        lambda value: bool(value) and _are_names(value),
    ),
    "data_axes": ("the name of a mesh axis, or a tuple of different names", _are_names),
    "passes": (
        "a tuple of passes such as (deepcompile.PipelineLoops(),), () for none, or None for all",
        _are_passes,
    ),
    "profile": (
        "a deepcompile.Profile (deepcompile.Profile.from_json(text) reads what to_json() wrote)",
        lambda value: value is None or isinstance(value, Profile),
    ),
    "plan": (
        "a deepcompile.Plan (deepcompile.Plan.from_json(text) reads what to_json() wrote)",
        lambda value: value is None or isinstance(value, Plan),
    ),
    "cache_dir": ("the path of a folder, or None", _is_path),
    "donate": ("True or False", lambda value: isinstance(value, bool)),
    "measure": ("True or False", lambda value: isinstance(value, bool)),
}
