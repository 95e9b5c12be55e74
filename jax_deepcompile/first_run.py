"""What comes before the first run of a compiled step: plans are measured, limits kept, processes agree."""

from __future__ import annotations

import json
from dataclasses import replace

from jax.sharding import Mesh

from jax_deepcompile.compiler import Compilation
from jax_deepcompile.costs.devices import machine_of
from jax_deepcompile.costs.fingerprint import fingerprint, program_text
from jax_deepcompile.jitted import Shardings, jit
from jax_deepcompile.planner.limits import require_fit
from jax_deepcompile.planner.session import fastest_of
from jax_deepcompile.profilers.rivals import copy_donated, measure_in_turns
from jax_deepcompile.profilers.take import take_profile
from jax_deepcompile.runtime.processes import Alone


def prepare(made: Compilation, args: tuple, processes: Alone) -> None:
    """Compiles what runs for ``args``: JAX keeps it for the run itself.

    Raises:
      MemoryExceededError: it exceeds the memory limit.
      NoRoomToMeasureError: plans are to be measured, and there is no memory for a copy of the state.
    """
    if made.context.options.measure:
        _choose(made, args, processes)
    compiled = made.jitted.lower(*args).compile()
    require_fit(made.context.name, compiled, made.planned.limit_bytes)
    if not processes.is_alone:
        processes.agree(f"run {title(made)}")
    made.keep(compiled, args)


def _choose(made: Compilation, args: tuple, processes: Alone) -> None:
    """Runs the plans that simulate fastest, of those that have the state in the same place, on a copy of ``args``: the
    fastest is taken."""
    simulated, traced, use = made.planned, made.traced, made.context.use
    mesh = use.mesh
    if made.runs.fastest is not None or not simulated.rivals:
        return
    assert isinstance(mesh, Mesh), "what is measured is attached"
    programs = ((plan, plan.program(made.sharded, mesh)) for plan in simulated.rivals)
    rivals = (replace(simulated, plan=plan, program=program, evaluation=None) for plan, program in programs)
    placed = made.placed
    each = [simulated, *(one for one in rivals if Shardings.of(one.program, traced, made.context.use) == placed)]
    steps = [jit(one, traced, placed, made.call.leaf_types, use).lower(*args).compile() for one in each]
    copied = copy_donated(made.context.name, args, traced.donated_leaves, steps, mesh)
    processes.agree(f"measure {len(each)} plans of {title(made)}")
    seconds, copied = measure_in_turns(steps, copied, simulated.program)
    seconds = json.loads(processes.first_says(json.dumps(seconds)))
    best = min(range(len(each)), key=seconds.__getitem__)
    on_gpus = use.platform == "cuda"
    singly = jit(each[best], traced, placed, made.call.leaf_types, use, singly=True) if on_gpus else None
    taken = take_profile(
        steps[best],
        copied,
        steps[best],
        each[best].program,
        mesh,
        base=made.sharded,
        known=simulated.profile,
        runs=_PROFILED_RUNS,
        compiler_options=each[best].plan.compiler_options(),
        singly=singly,
    )
    made.take(fastest_of(each, seconds, made.context.options), taken.profile)


def title(made: Compilation) -> str:
    """What runs, in words and with a digest that are equal in all processes that run the same."""
    planned = made.planned
    digest = fingerprint(
        program_text(planned.program), machine_of(made.context.use.mesh), planned.plan.compiler_options()
    )
    given = [port for port in made.program.inputs if not port.role.is_state]
    shapes = [f"{port.path} {port.dtype}[{','.join(map(str, port.shape))}]" for port in given[:_SHOWN]]
    more = [f"{len(given) - _SHOWN} more"] * (len(given) > _SHOWN)
    on = f" on {', '.join(shapes + more)}" if given else ""
    return f"{made.context.name}{on} (program {digest[:16]})"


_PROFILED_RUNS = 3

_SHOWN = 4
"""Arguments whose shapes an error shows."""
