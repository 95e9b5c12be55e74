"""What the backward pass of unrolled layers would gather again stays from the forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jax_deepcompile.ir.program import Program
from jax_deepcompile.planner.candidate import WORTH_SPARING, Candidate, Environment
from jax_deepcompile.planner.strategy import Proposal, Stage
from jax_deepcompile.planner.unrolled import choose_unsharded, free_bytes, repeats_of, starting, stays, waits
from jax_deepcompile.transforms.prefetch import Prefetch
from jax_deepcompile.transforms.unshard import ReusedGathers


@dataclass(frozen=True)
class UnshardUnrolled:
    """Gathers that the backward pass would repeat, and wait for or lose kernels' time to, stay from the forward."""

    slack: float = 1.25
    name: str = "unshard_unrolled"
    stage: Stage = Stage.MAIN

    def propose(self, base: Program, best: Candidate, environment: Environment) -> Iterator[Proposal]:
        if environment.limit_bytes is None:
            return
        repeats = repeats_of(base, best.plan, best, environment)
        chosen = choose_unsharded(repeats, free_bytes(repeats, best, environment))
        stay = {name for each in chosen for name in each.gathers}
        spared_s = sum(repeat.spared_s for repeat in repeats if repeat.name in stay - stays(best.plan))
        if not chosen or not (waits(base, best) or spared_s >= WORTH_SPARING * best.prediction.step_s):
            return
        plan, starts = best.plan.having(ReusedGathers, chosen), best.plan.of(Prefetch)
        size = sum(repeat.size_bytes for repeat in repeats if repeat.name in stay)
        said = f"{len(stay)} of {len(repeats)} repeated gathers stay, {size / 2**30:.2f} GiB"
        if starts:
            yield Proposal(starting(base, plan, best, environment, self.slack), said)
        yield Proposal(plan.without(Prefetch), said + ", and all others start as XLA has them" * bool(starts))
