"""What a plan is made of: decisions that know their data, when they make sense, the rewrite and how to say it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from jax_deepcompile import errors
from jax_deepcompile.analysis.loops import Loop, find_loops
from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.ir.program import Program


class Decision:
    """One thing that a plan says of a program; subclasses are frozen dataclasses, whose fields are plain data.

    Class attributes:
      kind: its name in JSON, in dumps and where it is left out by name.
      follows: the kinds that decide before it, ``after`` in the class statement. What it names are parts of the program
        that those make, so it is dropped where one of those changes.
    """

    kind: ClassVar[str]
    follows: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, kind: str, after: tuple[str, ...] = ()) -> None:
        super().__init_subclass__()
        cls.kind, cls.follows = kind, after

    def subjects(self) -> tuple[str, ...]:
        """What no other decision of this kind may speak of, such as its loop."""
        return ()

    def check(self, program: Program) -> None:
        """Raises PlanError where ``program``, as the decisions before make it, is not what this one is for."""

    def describe(self) -> str:
        """The decision as a line of a plan."""
        raise NotImplementedError

    @staticmethod
    def apply(program: Program, mesh: AnyMesh, decisions: Sequence[Any]) -> Program:
        """``program``, in the local view, rewritten by all ``decisions``; the same object if none changes it."""
        raise NotImplementedError


def refused(why: str) -> errors.PlanError:
    return errors.PlanError("the plan", why)


def listed(names: Sequence[str], loop: str) -> str:
    """``names`` for a sentence about ``loop``: those of its own parameters without the module that it is named by."""
    module = loop.partition(" @")[0] + "/"
    return ", ".join(name.removeprefix(module) for name in names)


def loop_named(program: Program, name: str, what: str) -> Loop:
    """The loop that a decision names; ``what`` it does with it is for the error."""
    loops = {loop.name: loop for loop in find_loops(program)}
    if name not in loops:
        raise refused(f"it {what} {name!r}, a loop that {program.name} does not have{nearest(name, loops)}")
    return loops[name]


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
