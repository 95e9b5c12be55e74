"""Gradient accumulation: the virtual axis along which a batch was split into microbatches becomes a loop.

Before, on one device::

    i = axis_index("microbatch"); x = dynamic_slice(batch, i * 2)
    W = all_gather(w); g = reduce_scatter(backward(W, x)); total = psum(g, "microbatch"); w' = update(w, total)

After::

    scan(i, carry sum = 0): x = dynamic_slice(batch, i * 2)
        W = all_gather(w); g = reduce_scatter(backward(W, x)); -> sum + g
    w' = update(w, sum)

Guarantees: the same numbers up to the order of the sums; nothing moves between devices that did not before; what is
carried is as large as what is summed, a gradient's shard, and has 32 bits; what does not depend on a microbatch is
computed once, but parameters are gathered in every iteration. A sum over devices and microbatches is done over
devices once, at the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_deepcompile._jax_compat import dce, has_side_effects, is_drop_var, new_var, open_jaxpr, provenance
from jax_deepcompile.analysis.microbatches import Round, Rounds, Total, choose_rounds, is_heavy
from jax_deepcompile.ir.memory import size_bytes
from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.ir.primitives import Collective, Scan, axis_names
from jax_deepcompile.ir.program import Port, Program, Role
from jax_deepcompile.ir.retrace import compute, read, trace_blocks
from jax_deepcompile.ir.rewrite import Walk
from jax_deepcompile.ir.traversal import variables


def accumulate(program: Program, mesh: AnyMesh) -> Program:
    """``program``, in the local view, with loops in the place of its virtual axis; itself if it has none."""
    if not program.mesh.virtual:
        return program
    (axis,) = program.mesh.virtual
    length = program.mesh.size_of((axis,))
    jaxpr = split_light_loops(open_jaxpr(program.jaxpr))
    rounds = choose_rounds(jaxpr, axis, length, _batch_bytes(program))
    once = {id(eqn): lambda eqn, values: _repeat(eqn, values, axis, length) for eqn in rounds.repeated}

    def body(consts, *blocks):
        known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *blocks), strict=True))
        for loop in rounds.loops:
            known = _run(loop, compute(loop.before, known, once), rounds, axis, length)
        known = compute(rounds.after, known, once)
        return [read(atom, known) for atom in jaxpr.outvars]

    on_devices = program.replace(
        inputs=tuple(_on_devices(port, program) for port in program.inputs),
        outputs=tuple(_on_devices(port, program) for port in program.outputs),
        mesh=program.mesh.devices,
    )
    return on_devices.replace(jaxpr=trace_blocks(body, on_devices, mesh))


def _on_devices(port: Port, program: Program) -> Port:
    return port.placed(port.where.on_devices(program.mesh))


def _batch_bytes(program: Program) -> int:
    """What a device's part of the batch takes."""
    atoms = zip(program.inputs, open_jaxpr(program.jaxpr).invars, strict=True)
    return sum(size_bytes(var) for port, var in atoms if port.role is Role.BATCH)


def _run(loop: Round, known: dict, rounds: Rounds, axis: str, length: int) -> dict:
    """``known`` and what comes out of ``loop``; what is kept for later loops is stacked."""
    summed = [total for total in loop.totals if total.how != "all_gather"]
    stacked = [total for total in loop.totals if total.how == "all_gather"]

    def body(carry, microbatch):
        index, own = microbatch
        given = known | dict(zip(loop.read, own, strict=True))
        inside = compute(loop.body, given, {id(eqn): lambda *_: [index] for eqn in rounds.indices})
        sums = [_join(total.how, old, read(total.source, inside)) for total, old in zip(summed, carry, strict=True)]
        return sums, ([read(total.source, inside) for total in stacked], [inside[var] for var in loop.kept])

    microbatches = jnp.arange(length, dtype=jnp.int32), [known[var] for var in loop.read]
    carry, (pieces, kept) = lax.scan(body, [_start(total) for total in summed], microbatches)
    found = dict(zip(loop.kept, kept, strict=True))
    found |= {total.result: _finish(total, value, axis) for total, value in zip(summed, carry, strict=True)}
    found |= {total.result: _assemble(total, piece, axis) for total, piece in zip(stacked, pieces, strict=True)}
    return known | found


def _start(total: Total) -> jax.Array:
    """The value that changes nothing when combined with another; for sums in at least 32 bits."""
    shape, dtype = total.source.aval.shape, total.source.aval.dtype
    if total.how == "psum":
        narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
        return jnp.zeros(shape, jnp.float32 if narrow else dtype)
    if total.how == "last":
        return jnp.zeros(shape, dtype)
    lowest, highest = _limits(dtype)
    return jnp.full(shape, lowest if total.how == "pmax" else highest, dtype)


def _limits(dtype) -> tuple[Any, Any]:
    if jnp.issubdtype(dtype, jnp.bool_):
        return False, True
    if jnp.issubdtype(dtype, jnp.floating):
        return -jnp.inf, jnp.inf
    return jnp.iinfo(dtype).min, jnp.iinfo(dtype).max


def _join(how: str, old: jax.Array, new: jax.Array) -> jax.Array:
    match how:
        case "psum":
            return old + new.astype(old.dtype)
        case "pmax":
            return jnp.maximum(old, new)
        case "pmin":
            return jnp.minimum(old, new)
    return new


def _finish(total: Total, value: jax.Array, axis: str) -> jax.Array:
    """The total over all iterations of all devices that the collective is over."""
    if total.eqn is None:
        return value
    others = _others(axis_names(total.eqn), axis)
    with provenance(total.eqn):
        if others:
            value = {"psum": lax.psum, "pmax": lax.pmax, "pmin": lax.pmin}[total.how](value, others)
        return value.astype(total.result.aval.dtype)


def _assemble(total: Total, pieces: jax.Array, axis: str) -> jax.Array:
    """The pieces of all iterations, stacked along a new first dimension, put in their places along their own."""
    dim, others = Collective(total.eqn).dimension, _others(axis_names(total.eqn), axis)
    assert dim is not None, "gathers over microbatches are tiled"
    with provenance(total.eqn):
        pieces = jnp.moveaxis(pieces, 0, dim)
        whole = pieces.reshape(*pieces.shape[:dim], math.prod(pieces.shape[dim : dim + 2]), *pieces.shape[dim + 2 :])
        return lax.all_gather(whole, others, axis=dim, tiled=True) if others else whole


def _others(names: Sequence[str], axis: str) -> tuple[str, ...]:
    return tuple(name for name in names if name != axis)


def _repeat(eqn, values: Sequence[jax.Array], axis: str, length: int) -> list[jax.Array]:
    """A collective over ``length`` iterations that all have the same ``values``."""
    results = []
    for value, source, result in zip(values, eqn.invars, eqn.outvars, strict=True):
        total = Total(eqn.primitive.name, source, result, eqn)
        value = jnp.asarray(value)
        if total.how == "all_gather":
            results.append(_assemble(total, jnp.broadcast_to(value, (length, *value.shape)), axis))
        else:
            times = length if total.how == "psum" else 1
            results.append(_finish(total, value * jnp.asarray(times, value.dtype), axis))
    return results


def split_light_loops(jaxpr: Any) -> Any:
    """``jaxpr`` with every scan split in two that makes some results of heavy work and carries others without.

    What a loop counts beside can then be known before the heavy work is begun. Stacked results stay with the heavy
    work. Without such a scan ``jaxpr`` itself comes back.

    Before::

        n, s = scan(carry n, s; x, mask): n + sum(mask), s + sum(dot(x, w) * mask)

    After::

        n = scan(carry n; mask): n + sum(mask)
        s = scan(carry s; x, mask): s + sum(dot(x, w) * mask)

    Guarantees: values are bitwise the same; heavy work is done, and what has side effects happens, as often as before.

    Only scans that are not in other loops are split.
    """
    heavy: set = set()
    walk = Walk(jaxpr)
    for eqn in walk:
        results = _heavy_results(eqn, heavy)
        heavy.update(eqn.outvars[index] for index in results)
        splits = eqn.primitive.name == "scan" and results and not has_side_effects(eqn)
        used = {index for index, var in enumerate(Scan(eqn).results.carry) if not is_drop_var(var)} if splits else set()
        light = used - results
        rest = set(range(len(eqn.outvars))) - light
        walk.eqns += [_keeping(eqn, light), _keeping(eqn, rest)] if light else [eqn]
    split = walk.result()
    return jaxpr if split is jaxpr else dce(split)


def _heavy_results(eqn, heavy: set) -> set[int]:
    """The results of ``eqn`` that take heavy work, in it or, as ``heavy`` knows, before it."""
    if eqn.primitive.name == "scan":
        return _heavy_results_of_scan(eqn, heavy)
    return set(range(len(eqn.outvars))) if is_heavy(eqn) or not heavy.isdisjoint(variables(eqn.invars)) else set()


def _heavy_results_of_scan(eqn, heavy: set) -> set[int]:
    body, carried = Scan(eqn).body, Scan(eqn).inputs.carry
    given = zip(body.invars, eqn.invars, strict=True)
    inside = {var for var, atom in given if not heavy.isdisjoint(variables([atom]))}
    while True:
        made = set(inside)
        for inner in body.eqns:
            if is_heavy(inner) or not made.isdisjoint(variables(inner.invars)):
                made.update(inner.outvars)
        results = {index for index, atom in enumerate(body.outvars) if not made.isdisjoint(variables([atom]))}
        grown = inside | {var for index, var in enumerate(carried) if index in results}
        if grown == inside:
            return results
        inside = grown


def _keeping(eqn, kept: set[int]) -> Any:
    """``eqn`` with other names for all results but those ``kept``, so that nothing reads them."""
    return eqn.replace(outvars=[var if index in kept else new_var(var.aval) for index, var in enumerate(eqn.outvars)])
