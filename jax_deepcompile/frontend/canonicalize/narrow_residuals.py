"""What one loop leaves for another is left as what it was widened from, and widened again where it is read."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend import core as jex

from jax_deepcompile._jax_compat import closed_consts, eval_local, new_jaxpr, open_jaxpr, provenance
from jax_deepcompile.ir.primitives import Scan
from jax_deepcompile.ir.retrace import compute, rerun, rescan
from jax_deepcompile.ir.rewrite import Walk, abstract, renamed, with_renamed_operands
from jax_deepcompile.ir.traversal import variables
from jax_deepcompile.ir.widened import Widened, widened


def with_narrow_residuals(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """``closed`` with no stack that a ``scan`` makes for others alone and that is widened from something smaller.

    Before, where differentiation keeps what a layer computed in 32 bits of its input, or rounded to eight::

        y s:f32[4,8] = scan[jaxpr={ lambda ; x:bf16[8]. let a:f32[8] = convert_element_type x; ... in (y, a) }] x
        g = scan[jaxpr={ lambda ; g:bf16[8] a:f32[8]. let ... }] g s

    After, with ``s`` dead::

        y s:f32[4,8] t:bf16[4,8] = scan[jaxpr={ lambda ; x:bf16[8]. let a:f32[8] = ...; ... in (y, a, x) }] x
        g = scan[jaxpr={ lambda ; g:bf16[8] a:f32[8] x:bf16[8]. let b:f32[8] = convert_element_type x; ... }] g s t

    Values are the same, bit for bit. XLA keeps stacks in the type that they were written in.
    """
    walk, readers = Walk(closed, with_narrow_residuals), _readers(open_jaxpr(closed))
    left = dict[Any, _Left]()
    for eqn in walk:
        if not _is_loop(eqn):
            walk.eqns.append(eqn)
            continue
        for loop in _widening_what_it_reads(eqn, left, walk.names):
            wanted = _widened(Scan(loop), readers) if _is_loop(loop) else {}
            walk.eqns += _leaving(loop, wanted, left, walk.names) if wanted else [loop]
    return walk.result()


@dataclass(frozen=True)
class _Left:
    """What a loop left of a stack.

    Attributes:
      result: the variable of the loop's body that was written into it.
      made: of what that was made.
      stacks, constants: by variables of the body, what there is of them outside of it.
    """

    result: Any
    made: Widened
    stacks: Mapping[Any, Any]
    constants: Mapping[Any, Any]


def _is_loop(eqn: Any) -> bool:
    return eqn.primitive.name == "scan" and not closed_consts(Scan(eqn).closed)


def _readers(jaxpr: jex.Jaxpr) -> Mapping[Any, list]:
    """By variables, the equations that read them, each with the operand's position; results are read by None."""
    found = defaultdict(list)
    for eqn in jaxpr.eqns:
        for place, atom in enumerate(eqn.invars):
            if isinstance(atom, jex.Var):
                found[atom].append((eqn, place))
    for atom in variables(jaxpr.outvars):
        found[atom].append((None, 0))
    return found


def _only_loops_slice(readers: Sequence) -> bool:
    def slices(eqn: Any, place: int) -> bool:
        return eqn is not None and _is_loop(eqn) and place >= Scan(eqn).num_consts + Scan(eqn).num_carry

    return bool(readers) and all(slices(*reader) for reader in readers)


def _widened(scan: Scan, readers: Mapping[Any, list]) -> dict[Any, tuple[Any, Widened]]:
    """By the stacks of ``scan`` that only loops slice, what it writes into them, if that is made of less."""
    made = widened(scan.body, scan.inputs.consts)
    pairs = zip(scan.results.ys, scan.outputs.ys, strict=True)
    written = {stack: atom for stack, atom in pairs if isinstance(atom, jex.Var) and atom in made}
    return {stack: (atom, made[atom]) for stack, atom in written.items() if _only_loops_slice(readers[stack])}


def _leaving(eqn: Any, wanted: Mapping[Any, tuple[Any, Widened]], left: dict[Any, _Left], names: dict) -> list:
    """``eqn``, which also stacks what is ``wanted``; notes what is ``left`` then."""
    scan = Scan(eqn)
    there = dict(zip(scan.inputs.xs, scan.operands.xs, strict=True))
    there |= {atom: stack for stack, atom in zip(scan.results.ys, scan.outputs.ys, strict=True) if atom not in there}
    constants = dict(zip(scan.inputs.consts, scan.operands.consts, strict=True))
    sources = dict.fromkeys(var for _, made in wanted.values() for var in made.sources)
    more, eqns = [var for var in sources if var not in there], [eqn]
    if more:
        body = new_jaxpr(scan.body.invars, [*scan.body.outvars, *more], scan.body.eqns)
        eqns, stacks = _traced(eqn, lambda operands: rerun(eqn, body, operands), eqn.invars, names)
        there |= dict(zip(more, stacks, strict=True))
    for stack, (result, made) in wanted.items():
        stacked = {var: renamed(there[var], names) for var in made.sources}
        left[stack] = _Left(result, made, stacked, {var: constants[var] for var in made.free})
    return eqns


def _widening_what_it_reads(eqn: Any, left: Mapping[Any, _Left], names: dict) -> list:
    """``eqn``, which makes of what is ``left`` what it read of stacks."""
    scan = Scan(eqn)
    pairs = enumerate(scan.operands.xs)
    reading = {place: left[atom] for place, atom in pairs if isinstance(atom, jex.Var) and atom in left}
    if not reading:
        return [eqn]
    sliced = {var: atom for each in reading.values() for var, atom in each.stacks.items()}
    constants = {var: atom for each in reading.values() for var, atom in each.constants.items()}
    chain = list({id(made): made for each in reading.values() for made in each.made.eqns}.values())

    def run(operands: list) -> list:
        own, more = operands[: len(eqn.invars)], operands[len(eqn.invars) :]
        stacks, fixed = more[: len(sliced)], dict(zip(constants, more[len(sliced) :], strict=True))
        consts, carry, xs = scan.split(own)

        def body(carry: list, slices: list) -> list:
            known = compute(chain, fixed | dict(zip(sliced, slices[len(xs) :], strict=True)))
            widened = {place: known[each.result] for place, each in reading.items()}
            layer = [widened.get(place, given) for place, given in enumerate(slices[: len(xs)])]
            return eval_local(scan.closed, [*consts, *carry, *layer])

        return rescan(eqn, body, carry, [*xs, *stacks])

    eqns, _ = _traced(eqn, run, [*eqn.invars, *sliced.values(), *constants.values()], names)
    return eqns


def _traced(eqn: Any, run: Callable[[list], list], operands: Sequence, names: dict) -> tuple[list, list]:
    """What takes the place of ``eqn``, ``run`` on ``operands``, and what that returns more.

    What it returns of its operands is noted among ``names``.
    """

    def once(*values):
        with provenance(eqn):
            return run(list(values))

    jaxpr = open_jaxpr(jax.make_jaxpr(once)(*map(abstract, operands)))
    known = dict(zip(jaxpr.invars, operands, strict=True))
    for atom, result in zip(jaxpr.outvars, eqn.outvars, strict=False):
        if isinstance(atom, jex.Literal) or atom in known:
            names[result] = renamed(atom, known)
        else:
            known[atom] = result
    eqns = [with_renamed_operands(made, known) for made in jaxpr.eqns]
    eqns = [made.replace(outvars=[known.get(var, var) for var in made.outvars]) for made in eqns]
    return eqns, [renamed(atom, known) for atom in jaxpr.outvars[len(eqn.outvars) :]]
