"""Fully sharded training of ordinary JAX train steps.

Put ``@jax_deepcompile.shard`` on a single-device Flax train step and it trains fully sharded::

    import jax_deepcompile as deepcompile

    @deepcompile.shard
    def train_step(state, batch):
        ...
        return state, metrics
"""

import importlib
from typing import TYPE_CHECKING

from jax_deepcompile import errors

if TYPE_CHECKING:
    from jax_deepcompile.public import (
        BucketCollectives,
        Candidate,
        Decision,
        DeepenLoops,
        DelayReductions,
        Environment,
        KeepActivations,
        OpRule,
        OverlapMicrobatches,
        PipelineLoops,
        Plan,
        PrefetchGathers,
        Profile,
        Program,
        Proposal,
        ReduceInOrder,
        RuleBuilder,
        ShardedStep,
        Stage,
        Strategy,
        Unshard,
        UnshardMicrobatches,
        UnshardUnrolled,
        register_rule,
        shard,
        simulate,
        targets,
    )
else:

    def __getattr__(name: str) -> object:
        """Loads JAX and all of the package; until then the command line is light, and can be interrupted."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return globals().setdefault(name, getattr(importlib.import_module(f"{__name__}.public"), name))

    def __dir__() -> list[str]:
        return [*globals(), *__all__]


__all__ = [
    "BucketCollectives",
    "Candidate",
    "Decision",
    "DeepenLoops",
    "DelayReductions",
    "Environment",
    "KeepActivations",
    "OpRule",
    "OverlapMicrobatches",
    "PipelineLoops",
    "Plan",
    "PrefetchGathers",
    "Profile",
    "Program",
    "Proposal",
    "ReduceInOrder",
    "RuleBuilder",
    "ShardedStep",
    "Stage",
    "Strategy",
    "Unshard",
    "UnshardMicrobatches",
    "UnshardUnrolled",
    "errors",
    "register_rule",
    "shard",
    "simulate",
    "targets",
]
