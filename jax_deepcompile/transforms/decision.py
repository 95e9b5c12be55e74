"""What a plan is made of: decisions that know their data, when they make sense, the rewrite and how to say it."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from jax_deepcompile import errors
from jax_deepcompile.analysis.dataflow import given
from jax_deepcompile.analysis.loops import Loop, find_loops
from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.ir.primitives import closed_like
from jax_deepcompile.ir.program import Program
from jax_deepcompile.ir.retrace import Compute, replace_equations, rerun


class Decision:
    """One thing that a plan says of a program; subclasses are frozen dataclasses, whose fields are plain data.

    Class attributes:
      kind: its name in JSON, in dumps and where it is left out by name.
      follows: the kinds that decide before it, ``after`` in the class statement. What it names are parts of the program
        that those make, so it is dropped where one of those changes.
      about: the fields that name what no other decision of this kind may speak of, such as its loop.
      says: the decision as a line of a plan, where that does not depend on its fields.
      on_host: whether it needs devices whose programs have values in their host's memory.
    """

    kind: ClassVar[str]
    follows: ClassVar[tuple[str, ...]] = ()
    about: ClassVar[tuple[str, ...]] = ()
    says: ClassVar[str] = ""
    on_host: ClassVar[bool] = False

    def __init_subclass__(
        cls,
        kind: str,
        after: tuple[str, ...] = (),
        about: tuple[str, ...] = (),
        says: str = "",
        on_host: bool = False,
    ) -> None:
        super().__init_subclass__()
        cls.kind, cls.follows, cls.about, cls.says, cls.on_host = kind, after, about, says or kind, on_host

    def subjects(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(getattr(self, field) for field in self.about))

    def check(self, program: Program) -> None:
        """Raises PlanError where ``program``, as the decisions before make it, is not what this one is for."""

    def describe(self) -> str:
        """The decision as a line of a plan."""
        return self.says

    @staticmethod
    def apply(program: Program, mesh: AnyMesh, decisions: Sequence[Any]) -> Program:
        """``program``, in the local view, rewritten by all ``decisions``; the same object if none changes it.

        Raises:
          PlanError: a decision names what ``program`` does not have.
        """
        raise NotImplementedError


def refused(why: str) -> errors.PlanError:
    return errors.PlanError("the plan", why)


def listed(names: Sequence[str], loop: str) -> str:
    """``names`` for a sentence about ``loop``: those of its own without the module that it is named by.

    Values are named by scopes, which may begin further in than parameters' paths do.
    """
    module = loop.partition(" @")[0].split("/")
    modules = ["/".join(module[start:]) + "/" for start in range(len(module))]

    def short(name: str) -> str:
        return name.removeprefix(next(filter(name.startswith, modules), ""))

    return ", ".join(map(short, names))


def loop_named(program: Program, name: str, what: str) -> Loop:
    """The loop that a decision names; ``what`` it does with it is for the error."""
    loops = {loop.name: loop for loop in find_loops(program)}
    if name not in loops:
        raise refused(f"it {what} {name!r}, a loop that {program.name} does not have{nearest(name, loops)}")
    return loops[name]


def loops_in_turn(program: Program, first: str, second: str, what: tuple[str, str]) -> tuple[Loop, Loop]:
    """Two loops in the same place that a decision names, and ``what`` it does with each."""
    forward, backward = (loop_named(program, *each) for each in zip((first, second), what, strict=True))
    if forward.path[:-1] != backward.path[:-1] or forward.path >= backward.path:
        raise refused(f"{second!r} does not follow {first!r} in the same place")
    return forward, backward


def positions(wanted: Iterable[str], known: Sequence[str], what: str) -> list[int]:
    """Where each of ``wanted`` is among ``known``; ``what`` the decision does with them is for the error."""
    places = {name: place for place, name in enumerate(known)}
    found = []
    for name in wanted:
        if name not in places:
            raise refused(f"it {what} {name!r}, of which there is none there{nearest(name, known)}")
        if places[name] in found:
            raise refused(f"it {what} {name!r} twice")
        found.append(places[name])
    return found


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error's sentence: what ``name`` may have been meant to be."""
    close = difflib.get_close_matches(name, list(known), n=3, cutoff=0.4) or list(known)[:3]
    return f"; the nearest names: {', '.join(map(repr, close))}" if close else ""


def replace_loops(program: Program, mesh: AnyMesh, ways: Mapping[str, Callable[[Loop], Compute]]) -> Program:
    """``program`` with each loop that ``ways`` names run as it says, inner ones before those around them.

    A loop keeps its name, whatever becomes of loops beside it.
    """
    depths = {len(loop.path) for loop in find_loops(program) if loop.name in ways}
    for depth in sorted(depths, reverse=True):
        loops = [loop for loop in find_loops(program) if loop.name in ways and len(loop.path) == depth]
        program = replace_equations(program, mesh, {id(loop.eqn): ways[loop.name](loop) for loop in loops})
    return program


def replace_bodies(
    program: Program, mesh: AnyMesh, names: Collection[str], what: str, rewrite: Callable[[Any, str], Any]
) -> Program:
    """``program`` with the bodies of loops rewritten, and what is outside of loops where a name is empty.

    Args:
      names: of the loops; ``what`` the decision does with them is for the error.
      rewrite: makes the open jaxpr that runs instead of one, of which it is given the loop's name, too.
    """
    for name in filter(None, names):
        loop_named(program, name, what)

    def run(loop: Loop) -> Compute:
        inner = given(rewrite(loop.scan.closed, loop.name), ())
        return lambda eqn, operands: rerun(eqn, inner, operands)

    program = replace_loops(program, mesh, {name: run for name in names if name})
    if "" not in names:
        return program
    return program.replace(jaxpr=closed_like(program.jaxpr, rewrite(program.jaxpr, "")))


def replace_pairs(
    program: Program,
    mesh: AnyMesh,
    decisions: Sequence[Any],
    what: tuple[str, str],
    bridge: Callable[[Program, Loop, Loop, Any], tuple[Compute, Compute] | None],
) -> Program:
    """``program`` with the ``forward`` and ``backward`` loops of each decision run as ``bridge`` says.

    Inner ones go before those around them, which have their rewritten bodies; None leaves a pair as it is.
    """

    def pair(each: Any) -> tuple[Loop, Loop]:
        return loops_in_turn(program, each.forward, each.backward, what)

    depths = {id(each): len(pair(each)[0].path) for each in decisions}
    for each in sorted(decisions, key=lambda each: -depths[id(each)]):
        forward, backward = pair(each)
        if (ways := bridge(program, forward, backward, each)) is not None:
            program = replace_equations(program, mesh, {id(forward.eqn): ways[0], id(backward.eqn): ways[1]})
    return program
