"""A sharded step as a method."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax

from jax_deepcompile import errors
from jax_deepcompile.frontend.call import holds_objects
from jax_deepcompile.summary import Summarized, Summary

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax.sharding import AbstractMesh, Mesh

    from jax_deepcompile.api import ShardedStep
    from jax_deepcompile.costs.profile import Profile
    from jax_deepcompile.planner.plan import Plan
    from jax_deepcompile.profilers.take import Taken
    from jax_deepcompile.stages import LoweredStep, TracedStep
    from jax_deepcompile.summary import Text


class BoundStep(Summarized):
    """A ``ShardedStep`` that is a method, bound to its object: the first argument of every call."""

    def __init__(self, step: ShardedStep, instance: Any) -> None:
        self._step = step
        self._instance = instance

    def __call__(self, *args, **kwargs):
        return self._step(self._self(), *args, **kwargs)

    def init(self, create_state: Callable, *args, **kwargs) -> Any:
        """As ``ShardedStep.init``: the object has no part in it."""
        return self._step.init(create_state, *args, **kwargs)

    def reshard(self, mesh: Any = None, **options: Any) -> BoundStep:
        return BoundStep(self._step.reshard(mesh, **options), self._instance)

    def trace(self, *args, **kwargs) -> TracedStep:
        return self._step.trace(self._self(), *args, **kwargs)

    def lower(self, *args, **kwargs) -> LoweredStep:
        return self._step.lower(self._self(), *args, **kwargs)

    def lower_gspmd(self, *args, **kwargs) -> jax.stages.Lowered:
        return self._step.lower_gspmd(self._self(), *args, **kwargs)

    def plan(self, *args, **kwargs) -> Plan:
        return self._step.plan(self._self(), *args, **kwargs)

    def profile(self, *args, runs: int = 5, known: Profile | None = None) -> Taken:
        return self._step.profile(self._self(), *args, runs=runs, known=known)

    def _summary(self) -> Summary:
        bound = f", bound to a {type(self._instance).__name__}"
        summary = self._step._summary()
        return Summary(summary.title + bound, summary.rows)

    def explain(self) -> Text:
        return self._step.explain()

    @property
    def mesh(self) -> Mesh | AbstractMesh:
        return self._step.mesh

    def _self(self) -> Any:
        if not holds_objects(self._instance) and jax.tree_util.all_leaves([self._instance]):
            raise errors.PlainSelfError(self._step._name, self._instance)
        return self._instance
