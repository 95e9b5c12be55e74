"""What loops over time steps add up of small products, made at once after them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jax_deepcompile.analysis.loops import Loop, find_loops
from jax_deepcompile.ir.memory import size_bytes
from jax_deepcompile.ir.program import Program
from jax_deepcompile.planner.candidate import Candidate, Environment
from jax_deepcompile.planner.strategy import Proposal, Stage
from jax_deepcompile.transforms.products_after_loops import ProductsAfterLoop, written_bytes


@dataclass(frozen=True)
class ProductsAfterLoops:
    """Products are made after a loop where what it stacks for that is smaller than the sums that it rewrites.

    Where no limit of memory must hold it stacks no more than it reads of stacks.
    """

    name: str = "products_after_loops"
    stage: Stage = Stage.MAIN

    def propose(self, base: Program, best: Candidate, environment: Environment) -> Iterator[Proposal]:
        worth_it = small_products(base)
        if environment.limit_bytes is None:
            worth_it = [loop for loop in worth_it if _stacks_less(loop)]
        loops = [ProductsAfterLoop(loop.name) for loop in worth_it]
        if loops and not best.plan.of(ProductsAfterLoop):
            decision = f"sums of products of {len(loops)} loops are made after them"
            yield Proposal(best.plan.having(ProductsAfterLoop, loops), decision)


def small_products(program: Program) -> list[Loop]:
    """The loops that write more of sums of products than they would stack to have them made after."""
    written = [(loop, written_bytes(loop.eqn)) for loop in find_loops(program)]
    return [loop for loop, (sums_bytes, stacked_bytes) in written if stacked_bytes < sums_bytes]


def _stacks_less(loop: Loop) -> bool:
    _, stacked_bytes = written_bytes(loop.eqn)
    return stacked_bytes <= sum(map(size_bytes, loop.slices))
