"""Parameters that are in the host's memory, of which layer loops copy to the device a layer at a time.

Before::

    scan(x, t): w = all_gather(p[t]); ...
    p' = update(p, g)

After::

    scan(x, t): w = all_gather(to_device(p[t])); ...
    p' = to_host(update(to_device(p), g))

A pipelined loop copies a layer one iteration ahead, as it gathers. What is not a layer loop reads leaves whole; where
``offload_state`` has the same leaves, what updates them reads them as it comes to them.

Guarantees: values are bitwise the same; what a loop reads is copied once in an iteration, what else there is once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend import core as jex

from jax_deepcompile._jax_compat import bind, closed_consts, open_jaxpr, provenance
from jax_deepcompile.analysis.dataflow import variables
from jax_deepcompile.analysis.names import parameter_names
from jax_deepcompile.ir.memory import DEVICE, HOST
from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.ir.primitives import Scan
from jax_deepcompile.ir.program import Program
from jax_deepcompile.ir.retrace import read, rescan, trace_blocks
from jax_deepcompile.transforms.decision import Decision, positions
from jax_deepcompile.transforms.offload_state import movable, on_host


@dataclass(frozen=True)
class OffloadedParameters(Decision, kind="offload_parameters", on_host=True):
    """Stacks of parameters are in the host's memory, and layer loops copy what they gather.

    Attributes:
      leaves: by path.
    """

    leaves: tuple[str, ...]

    def subjects(self) -> tuple[str, ...]:
        return self.leaves

    def describe(self) -> str:
        return f"in the host's memory, copied a layer ahead of its use: {', '.join(self.leaves)}"

    @staticmethod
    def apply(program: Program, mesh: AnyMesh, decisions: Sequence[OffloadedParameters]) -> Program:
        named = [name for each in decisions for name in each.leaves]
        known = streamable(program)
        chosen = {list(known)[place] for place in positions(named, list(known.values()), "copies by layer")}
        if not chosen:
            return program
        there = on_host(program, chosen)
        jaxpr = open_jaxpr(program.jaxpr)
        away = {jaxpr.invars[place] for place in chosen}
        results = {result for place, result in program.state_outputs if place in chosen}

        def body(consts: Sequence, *blocks: Any) -> list:
            made = _run(jaxpr, dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *blocks), strict=True)), away)
            back = [
                jax.device_put(value, HOST) if place in results and atom not in away else value
                for place, (atom, value) in enumerate(zip(jaxpr.outvars, made, strict=True))
            ]
            return [
                jax.device_put(value, DEVICE) if place not in results and atom in away else value
                for place, (atom, value) in enumerate(zip(jaxpr.outvars, back, strict=True))
            ]

        return there.replace(jaxpr=trace_blocks(body, there, mesh))


def streamable(program: Program) -> dict[int, str]:
    """By position the names of the stacks of the state that layer loops read, and within loops nothing else does; but
    for those that such loops update."""
    jaxpr, names = open_jaxpr(program.jaxpr), parameter_names(program)
    scans = [Scan(eqn) for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
    pairs = {(before, after) for scan in scans for before in scan.operands.xs for after in scan.results.ys}
    state = {place: (jaxpr.invars[place], jaxpr.outvars[result]) for place, result in program.state_outputs}
    places = [place for place in movable(program) if state.get(place) not in pairs]
    loops = sliced_by(jaxpr, [jaxpr.invars[place] for place in places])
    return {place: names[place] for place in places if loops[jaxpr.invars[place]]}


def sliced_by(jaxpr: Any, wanted: Iterable[Any], in_loop: bool = False) -> dict[Any, int]:
    """How many loops read each of ``wanted`` a slice at a time; 0 where something in a loop reads it otherwise."""
    loops, otherwise = dict.fromkeys(wanted, 0), set()
    for eqn in open_jaxpr(jaxpr).eqns:
        used = loops.keys() & variables(eqn.invars)
        if not used:
            continue
        if eqn.primitive.name != "scan":
            otherwise |= used if in_loop else set()
            continue
        scan = Scan(eqn)
        otherwise |= used & set(variables(scan.operands.carry))
        pairs = zip(scan.operands.consts, scan.inputs.consts, strict=True)
        within = {made: atom for atom, made in pairs if variables([atom]) and atom in used}
        for made, count in sliced_by(scan.closed, within, in_loop=True).items():
            loops[within[made]] += count
            otherwise |= set() if count else {within[made]}
        for atom in used.intersection(variables(scan.operands.xs)):
            loops[atom] += sum(atom is each for each in scan.operands.xs)
    return {var: 0 if var in otherwise else count for var, count in loops.items()}


def reads(program: Program) -> dict[str, int]:
    """How often a step reads all layers of what is ``streamable``, by name."""
    jaxpr = open_jaxpr(program.jaxpr)
    return {name: _reads(jaxpr, jaxpr.invars[place]) for place, name in streamable(program).items()}


def _reads(jaxpr: Any, var: Any) -> int:
    count = 0
    for eqn in open_jaxpr(jaxpr).eqns:
        if eqn.primitive.name == "scan" and var in variables(eqn.invars):
            scan = Scan(eqn)
            pairs = zip(scan.operands.consts, scan.inputs.consts, strict=True)
            count += sum(atom is var for atom in scan.operands.xs)
            count += scan.length * sum(_reads(scan.closed, made) for atom, made in pairs if atom is var)
    return count


def _run(jaxpr: Any, known: Mapping[Any, Any], away: Collection) -> list:
    """The results of ``jaxpr``; variables that are ``away`` are on the host, all others are not."""
    known, here = dict(known), {}

    def at_hand(atom: Any) -> Any:
        if not _is_away(atom, away):
            return read(atom, known)
        if atom not in here:
            here[atom] = jax.device_put(known[atom], DEVICE)
        return here[atom]

    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan" and any(atom in away for atom in variables(eqn.invars)):
            results = _streaming(eqn, known, away, at_hand)
        else:
            results = bind(eqn, [at_hand(atom) for atom in eqn.invars])
        known.update(zip(eqn.outvars, results, strict=True))
    return [read(atom, known) for atom in jaxpr.outvars]


def _streaming(eqn: Any, known: Mapping[Any, Any], away: Collection, at_hand: Callable[[Any], Any]) -> list:
    """A scan that reads slices of stacks that are ``away``, or has loops in it that do."""
    scan, operands = Scan(eqn), Scan(eqn).operands
    consts = [known[atom] if _is_away(atom, away) else at_hand(atom) for atom in operands.consts]
    stacks = [known[atom] if _is_away(atom, away) else at_hand(atom) for atom in operands.xs]
    inner = {made for atom, made in zip(operands.consts, scan.inputs.consts, strict=True) if _is_away(atom, away)}
    closed = dict(zip(scan.body.constvars, closed_consts(scan.closed), strict=True))

    def body(carry: list, slices: list) -> list:
        here = [
            jax.device_put(value, DEVICE) if _is_away(atom, away) else value
            for atom, value in zip(operands.xs, slices, strict=True)
        ]
        return _run(scan.body, closed | dict(zip(scan.body.invars, (*consts, *carry, *here), strict=True)), inner)

    with provenance(eqn):
        return rescan(eqn, body, [at_hand(atom) for atom in operands.carry], stacks)


def _is_away(atom: Any, away: Collection) -> bool:
    return isinstance(atom, jex.Var) and atom in away
