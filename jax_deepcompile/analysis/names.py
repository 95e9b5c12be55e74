"""What plans call the parts of a program: by parameter path, the user's scopes and functions, and phase.

``layers/mlp/up/kernel`` is a parameter, and what gathers it or reduces its gradient; ``layers @backward`` a loop over
the layers whose parameters it reads; ``layers/mlp dot_general`` a value, by the scope that computes it, and
``layers/mlp up`` one that ``checkpoint_name`` calls so. Where several would have one name, those after the first are
numbered: ``layers/mlp dot_general #2``.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.extend import core as jex

from jax_deepcompile._jax_compat import open_jaxpr, user_function
from jax_deepcompile.analysis.dataflow import paired, variables
from jax_deepcompile.analysis.gathers import Gather, derived
from jax_deepcompile.analysis.loops import Loop, Path, computing_scans, loops_in, reduces_gradients
from jax_deepcompile.ir.paths import parts_of
from jax_deepcompile.ir.primitives import DEVICE_SUMS, NONLOCAL, Cond, Scan
from jax_deepcompile.ir.program import Program, Role

_WORD = re.compile(r"[\w./-]+")
_TRANSFORMED = re.compile(r"^\w+\((.*)\)$")
_NOT_SCOPES = frozenset({"", "rematted_computation", "checkpoint", "while", "body", "cond", "closed_call"})


def with_loop_names(program: Program) -> Program:
    """``program`` with names for its loops, which they keep whatever becomes of their bodies."""
    loops = list(loops_in(program.jaxpr))
    names = numbered([_loop_name(program, path, eqn) for path, eqn in loops])
    return program.replace(loop_names=dict(zip((path for path, _ in loops), names, strict=True)))


def keeping_loop_names(program: Program, before: Program, the_last: bool = False) -> Program:
    """``program``, rewritten from ``before``, with the names that its loops had there, wherever they are now.

    Where iterations run apart, copies of the loops inside stand beside their loop: those have no names. The loop is the
    first of them, or ``the_last``.
    """
    same = _same_loops(before.jaxpr, program.jaxpr, the_last)
    names = {new: before.loop_names[old] for old, new in same if old in before.loop_names}
    return program if names == program.loop_names else program.replace(loop_names=names)


def with_second_run(program: Program, name: str) -> Program:
    """``program`` in which a copy of the loop called ``name`` follows it, with names for that and the loops inside."""
    (at,) = (path for path, known in program.loop_names.items() if known == name)
    loops = dict(loops_in(program.jaxpr))
    made = _origin(loops[at], False)
    second = min(path for path, eqn in loops.items() if len(path) == 1 and path > at and _origin(eqn, False) == made)
    known = {path: own for path, own in program.loop_names.items() if path[:1] == at}
    names = numbered([second_run(own) for own in known.values()])
    copies = {(*second, *path[1:]): copy for path, copy in zip(known, names, strict=True)}
    return program.replace(loop_names={**program.loop_names, **copies})


def with_recomputed_loops(program: Program, before: Program) -> Program:
    """``program``, rewritten from ``before``, with the names of its loops there, and others for their copies.

    Copies are what a backward loop computes again, at its beginning, of loops inside of a forward one.
    """
    program = keeping_loop_names(program, before, the_last=True)
    known = {_origin(eqn, False): before.loop_names[path] for path, eqn in reversed(list(loops_in(before.jaxpr)))}
    loops = [(path, eqn) for path, eqn in loops_in(program.jaxpr) if path not in program.loop_names]
    made = [(path, known[_origin(eqn, False)]) for path, eqn in loops if _origin(eqn, False) in known]
    names = numbered([f"{name.partition(' @')[0]} @recomputed" for _, name in made])
    taken = set(program.loop_names.values())
    copies = {path: name for (path, _), name in zip(made, names, strict=True) if name not in taken}
    return program.replace(loop_names={**program.loop_names, **copies})


def second_run(name: str) -> str:
    """What the loop ``name`` is called where it runs a second time, to update.

    >>> second_run("layers @backward")
    'layers @update'
    """
    return f"{name.partition(' @')[0]} @update"


def _same_loops(before: Any, after: Any, the_last: bool = False) -> Iterator[tuple[Path, Path]]:
    """Where loops of ``before`` were and are: those that one call made, in order, of more of them the first or last.

    Where there are more of them now, or fewer, those of the same scopes come first, if there are any.
    """
    old, new = dict(enumerate(computing_scans(before))), dict(enumerate(computing_scans(after)))
    if the_last:
        old, new = (dict(reversed(each.items())) for each in (old, new))
    made, left = (Counter(_origin(eqn, False) for eqn in each.values()) for each in (old, new))
    for scoped in (True, False):
        waiting: dict[Any, list[int]] = {}
        for position, eqn in new.items():
            waiting.setdefault(_origin(eqn, scoped), []).append(position)
        for position, eqn in list(old.items()):
            as_many = made[_origin(eqn, False)] == left[_origin(eqn, False)]
            found = [] if scoped and as_many else waiting.get(_origin(eqn, scoped))
            if found:
                same = found.pop(0)
                yield (position,), (same,)
                inside = _same_loops(Scan(old.pop(position)).body, Scan(new.pop(same)).body, the_last)
                yield from (((position, *was), (same, *now)) for was, now in inside)


def _origin(eqn: Any, scoped: bool) -> tuple:
    """The call that made an equation, which rewriting leaves, and its scopes, which a replaced one is without."""
    source = eqn.source_info
    return id(source.traceback), str(source.name_stack) if scoped else None


def parameter_names(program: Program) -> list[str]:
    """What each input is called: what is in the tree that has the parameters by its path in that, whatever it is."""
    paths = [parts_of(port.path) for port in program.inputs]
    arrays = [path for path, port in zip(paths, program.inputs, strict=True) if port.role is Role.PARAM and port.shape]
    argument, parameters = _shared(arrays)[:1], [path for path in arrays if path[1:2] == ["params"]] or arrays
    collections = itertools.takewhile("params".__eq__, _shared(parameters)[1:]) if argument else ()
    tree = [*argument, *collections][: min(map(len, parameters), default=1) - 1]
    named = [path[len(tree) :] if path[: len(tree)] == tree else path for path in paths]
    return ["/".join(path) for path in (named if len(set(map(tuple, named))) == len(named) else paths)]


def gather_names(program: Program, path: Path, gathers: Sequence[Gather]) -> list[str]:
    """What each of ``gathers`` in the loop at ``path`` is called; with its phase where the loop has none."""
    *_, (_, body) = _way_to(program, path)
    known = _inputs_at(program, path)
    names = [known.get(gather.sources[0], "value") for gather in gathers]
    if " @" not in program.loop_names.get(path, ""):
        names = [f"{name}{phase(body.eqns[each.position])}" for name, each in zip(names, gathers, strict=True)]
    return numbered(names)


def reduction_names(program: Program, loop: Loop, outputs: Sequence[int]) -> list[str]:
    """What is reduced for each of ``outputs``, positions among the results of ``loop``: by the parameter it updates."""
    known = gradient_names(program, loop.path[:-1])
    return numbered([known.get(loop.eqn.outvars[output], "value") for output in outputs])


def gradient_names(program: Program, path: Path) -> dict[Any, str]:
    """For variables in the body of the loop at ``path`` the parameter that they update, elementwise; () is outside."""
    names = dict(zip((port.path for port in program.inputs), parameter_names(program), strict=True))
    known = {
        atom: names[port.path]
        for port, atom in zip(program.outputs, open_jaxpr(program.jaxpr).outvars, strict=True)
        if port.role is Role.PARAM and port.path in names and isinstance(atom, jex.Var)
    }
    for eqn, jaxpr in _way_to(program, path):
        known = known if eqn is None else dict(paired(jaxpr.outvars, eqn.outvars, known))
        _spread(jaxpr, known)
    return known


def value_names(jaxpr: Any, phased: bool = False) -> dict[Any, str]:
    """What the variables that equations of ``jaxpr`` define are called; with their phase if ``phased``."""
    made = [(var, index, eqn) for eqn in open_jaxpr(jaxpr).eqns for index, var in enumerate(eqn.outvars)]
    names = [
        f"{_scope_name(eqn)} {_made_by(eqn)}{f'.{index}' if index else ''}{phase(eqn) if phased else ''}"
        for _, index, eqn in made
    ]
    return dict(zip((var for var, *_ in made), numbered(names), strict=True))


def _made_by(eqn: Any) -> str:
    """The name of the primitive, or the user's own: that of ``jax.ad_checkpoint.checkpoint_name``."""
    name = str(eqn.params.get("name", "")) if eqn.primitive.name == "name" else ""
    return name if _WORD.fullmatch(name) else eqn.primitive.name


def numbered(names: Sequence[str]) -> list[str]:
    """``names`` made different: those that were there before get a number, in front of the phase."""
    seen: Counter[str] = Counter()
    found = []
    for name in names:
        seen[name] += 1
        base, at, phase = name.partition(" @")
        found.append(name if seen[name] == 1 else f"{base} #{seen[name]}{at}{phase}")
    return found


def _loop_name(program: Program, path: Path, eqn: Any) -> str:
    """By the parameters whose slices it reads, else the function that the user wrote it in; with its phase."""
    around = _inputs_at(program, path[:-1])
    read = [around[atom] for atom in variables(Scan(eqn).operands.xs) if atom in around]
    roles = zip(parameter_names(program), program.inputs, strict=True)
    parameters = {name for name, port in roles if port.role is Role.PARAM}
    paths = [name.split("/") for name in dict.fromkeys(read) if name in parameters]
    if paths:
        module = _shared(paths) or _shared([path[1:] for path in paths]) if len(paths) > 1 else paths[0][:-1]
        return "/".join(module or paths[0]) + (" @backward" if _is_backward(eqn) else " @forward")
    function = _function(eqn)
    return function or ("microbatches" if any(loops_in(Scan(eqn).body)) or _is_backward(eqn) else "loop")


def _shared(paths: Sequence[Sequence[str]]) -> list[str]:
    """What all of ``paths`` begin with."""
    levels = itertools.takewhile(lambda level: len(set(level)) == 1, zip(*paths, strict=False))
    return [level[0] for level in levels]


def _is_backward(eqn: Any) -> bool:
    return reduces_gradients(eqn) or phase(eqn) == " @backward"


def _inputs_at(program: Program, path: Path) -> dict[Any, str]:
    """For variables in the body of the loop at ``path`` the input of the program that each is cheaply made of."""
    known = dict(zip(open_jaxpr(program.jaxpr).invars, parameter_names(program), strict=True))
    for eqn, jaxpr in _way_to(program, path):
        known = _derived(jaxpr, known if eqn is None else dict(paired(jaxpr.invars, eqn.invars, known)))
    return known


def _derived(jaxpr: jex.Jaxpr, known: dict[Any, str]) -> dict[Any, str]:
    """``known``, and what is cheaply made of that alone, stacks that loops make of its slices among it."""
    known = derived(jaxpr, known)
    for eqn in computing_scans(jaxpr):
        scan = Scan(eqn)
        inside = derived(scan.body, dict(paired(scan.inputs.xs, scan.operands.xs, known)))
        stacks = dict(paired(scan.results.ys, scan.outputs.ys, inside))
        known = derived(jaxpr, known | stacks) if stacks else known
    return known


def _way_to(program: Program, path: Path) -> Iterator[tuple[Any, jex.Jaxpr]]:
    """The program's jaxpr, without a loop, and the loops down to ``path``, each with its body."""
    jaxpr = open_jaxpr(program.jaxpr)
    yield None, jaxpr
    for position in path:
        eqn = computing_scans(jaxpr)[position]
        yield eqn, (jaxpr := Scan(eqn).body)


def _spread(jaxpr: jex.Jaxpr, known: dict[Any, str]) -> None:
    """Adds to ``known`` what its values are made of element by element, cast, reshaped or summed over devices."""
    for eqn in reversed(jaxpr.eqns):
        for operand, name in _made_of(eqn, known):
            known.setdefault(operand, name)


def _made_of(eqn: Any, known: Mapping[Any, str]) -> Iterator[tuple[Any, str]]:
    name, made = eqn.primitive.name, [var for var in eqn.outvars if var in known]
    if not made:
        return
    if name == "optimization_barrier":
        yield from paired(eqn.invars, eqn.outvars, known)
    elif name == "cond":
        for inner in Cond(eqn).branches:
            inside = dict(paired(inner.outvars, eqn.outvars, known))
            _spread(inner, inside)
            yield from paired(Cond(eqn).operands, inner.invars, inside)
    elif name == "scan":
        yield from paired(Scan(eqn).operands.carry, Scan(eqn).results.carry, known)
    elif len(eqn.outvars) == 1 and name not in NONLOCAL:
        operands: list[Any] = variables(eqn.invars)
        for atom in operands:
            if atom.aval.size == made[0].aval.size or name in DEVICE_SUMS:
                yield atom, known[made[0]]


def phase(eqn: Any) -> str:
    """`` @forward`` or `` @backward`` of a gradient; empty for what is in neither."""
    text = str(eqn.source_info.name_stack)
    if "transpose(" in text or "rematted_computation" in text:
        return " @backward"
    return " @forward" if "jvp(" in text else ""


def _scope_name(eqn: Any) -> str:
    return scopes(str(eqn.source_info.name_stack)) or _function(eqn) or "step"


@functools.lru_cache(maxsize=4096)
def scopes(name_stack: str) -> str:
    """The user's scopes in a name stack.

    >>> scopes("transpose(jvp(Llama))/layers/checkpoint/rematted_computation/mlp")
    'Llama/layers/mlp'
    """
    parts: list[str] = []
    for part in re.split(r"/(?![^()]*\))", name_stack):
        name = part
        while transformed := _TRANSFORMED.match(name):
            name = transformed[1]
        again = name != part and parts[-1:] == [name]  # transpose(jvp(Blocks))/jvp(Blocks)
        parts += [name] if name not in _NOT_SCOPES and not again else []
    return "/".join(parts)


def _function(eqn: Any) -> str:
    """The user's function that ``eqn`` is of; empty where no line of the user's is known."""
    return user_function(eqn).rpartition("<locals>.")[2]
