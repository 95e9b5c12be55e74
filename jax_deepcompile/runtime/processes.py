"""Processes that run the same programs say so to each other before each: collectives of others would wait forever.

They meet in the key-value store of JAX's coordination service, not in collectives of devices: a process that cannot
come says why there, and the others hear it at once.
"""

import atexit
import contextlib
import functools
import hashlib
import json
import logging
import sys
import time
from collections.abc import Iterator
from typing import Any, Protocol

import jax
from jax.sharding import AbstractMesh, Mesh

from jax_deepcompile import errors
from jax_deepcompile._jax_compat import coordination_client
from jax_deepcompile.ir.placement import attached

_MEETINGS_A_BLOCK = 64
_POLL_MS = 500
"""How long Ctrl-C may go unheard: nothing else hangs on it, the service answers as soon as there is an answer."""
_NEWS = 1 << 16
"""Of the number that counts arrivals, 32 bits in the service, the upper half counts those with something new to say."""


class Store(Protocol):
    """The part of JAX's coordination client that is needed here."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None: ...
    def key_value_increment(self, key: str, increment: int) -> int: ...
    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str: ...
    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]: ...
    def key_value_delete(self, key: str) -> None: ...


class Alone:
    """A process that runs its programs without others."""

    is_alone = True
    is_first = True

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        yield

    def agree(self, what: str) -> None:
        """Nobody disagrees."""

    def first_says(self, text: str) -> str:
        return text


class Processes(Alone):
    """The processes of one mesh, as one of them sees them.

    They meet again and again, and count their meetings. Each meeting has one verdict, which the last to arrive writes,
    or else the first that cannot come: ``["agreed", text]``, ``["differ", {process: what it said}]`` or
    ``["stopped", process, reason]``. Whoever has read it goes on to the next meeting.

    A meeting costs a process two messages, one to arrive and one for the verdict; what it is about to do is sent only
    where that is not what it did last.
    """

    is_alone = False

    def __init__(self, store: Store, own: int, members: tuple[int, ...], patience_s: float = 10.0) -> None:
        """
        Args:
          store: that all of them reach.
          own: index of this process.
          members: indices of all.
          patience_s: who is waited for after twice as long is named in the log.
        """
        self.is_first = own == members[0]
        self._store = store
        self._own = own
        self._members = members
        self._patience_s = patience_s
        self._root = f"jax_deepcompile/{hashlib.sha256(repr(members).encode()).hexdigest()[:16]}"
        self._meeting = 0
        self._kept_block = 0
        self._said: str | None = None
        self._depth = 0

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Tells the others of whatever is raised inside, unless they told it us; the outermost of several does."""
        self._depth += 1
        try:
            yield
        except errors.OtherProcessError:
            raise
        except BaseException as error:
            if self._depth == 1:
                self._stop(_in_words(error))
            raise
        finally:
            self._depth -= 1

    def agree(self, what: str) -> None:
        """Waits until all processes are here, to do the same.

        Args:
          what: this process is about to do, in words that are equal where it is.

        Raises:
          ProcessMismatchError: another is about to do something else.
          ProcessStoppedError: another cannot come.
        """
        news = what != self._said
        if news:
            self._store.key_value_set(f"{self._root}/said/{self._own}", what, allow_overwrite=True)
            self._said = what
        arrived = self._store.key_value_increment(self._key("arrived"), 1 + news * _NEWS)
        is_last = arrived % _NEWS == len(self._members)
        self._hear(self._settle(self._comparison(arrived >= _NEWS)) if is_last else self._awaited(what))

    def first_says(self, text: str) -> str:
        """What the first process says here; the others wait for it, however long that takes.

        Raises:
          ProcessStoppedError: another cannot come.
        """
        verdict = self._settle(["agreed", text]) if self.is_first else self._awaited("what the first one says")
        return self._hear(verdict)

    def leave(self) -> None:
        """Tells the others, should they wait for this process ever again, that its program has ended."""
        error = getattr(sys, "last_value", None)
        self._stop("its program has ended" + (f" with {_in_words(error)}" if error is not None else ""))

    def _key(self, name: str) -> str:
        return f"{self._root}/{self._meeting // _MEETINGS_A_BLOCK}/{self._meeting}/{name}"

    def _comparison(self, any_news: bool) -> list:
        """The verdict on what all of them said last; without news that was agreed on before."""
        if not any_news:
            return ["agreed", ""]
        said = {key.rsplit("/", 1)[1]: what for key, what in self._store.key_value_dir_get(f"{self._root}/said/")}
        return ["agreed", ""] if len(set(said.values())) == 1 else ["differ", said]

    def _settle(self, verdict: list) -> list:
        """Writes the verdict of this meeting, unless it has one; returns the one it has."""
        try:
            self._store.key_value_set(self._key("verdict"), json.dumps(verdict))
        except jax.errors.JaxRuntimeError as error:
            if not str(error).startswith("ALREADY_EXISTS"):
                raise
            return json.loads(self._store.blocking_key_value_get(self._key("verdict"), _POLL_MS))
        return verdict

    def _awaited(self, what: str) -> list:
        """The verdict of this meeting, once there is one."""
        start, times_named = time.monotonic(), 0
        while True:
            try:
                return json.loads(self._store.blocking_key_value_get(self._key("verdict"), _POLL_MS))
            except jax.errors.JaxRuntimeError as error:
                if not str(error).startswith("DEADLINE_EXCEEDED"):
                    raise
            if time.monotonic() - start > (times_named + 1) * self._patience_s:
                times_named += 1
                self._name_the_late(what, times_named)

    def _name_the_late(self, what: str, times: int) -> None:
        """Those who wait write that they do; a while later the others are known."""
        if times == 1:
            self._store.key_value_set(self._key(f"waiting/{self._own}"), "", allow_overwrite=True)
        elif times == 2:
            waiting = {int(key.rsplit("/", 1)[1]) for key, _ in self._store.key_value_dir_get(self._key("waiting/"))}
            late = errors.listed_processes([member for member in self._members if member not in waiting])
            logging.getLogger(__name__).warning(
                "Waiting for %s (%s). A slow one may be reading data, compiling, planning or writing a checkpoint.",
                late,
                what,
            )

    def _hear(self, verdict: list) -> str:
        """The text agreed on. All have read the verdicts of earlier meetings once there is agreement on this one."""
        kind, *details = verdict
        block = self._meeting // _MEETINGS_A_BLOCK
        self._meeting += 1
        if kind == "agreed":
            if self.is_first and block > self._kept_block:
                for old in range(self._kept_block, block):
                    self._store.key_value_delete(f"{self._root}/{old}")
                self._kept_block = block
            return details[0]
        self._said = None
        if kind == "differ":
            raise errors.ProcessMismatchError({int(process): what for process, what in details[0].items()})
        raise errors.ProcessStoppedError(*details)

    def _stop(self, reason: str) -> None:
        """Tells those who come to the next meeting, or wait there, that this process does not come.

        A process that is interrupted as it waits may have been agreed with: then it is the meeting after.
        """
        self._said = None
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            while self._settle(["stopped", self._own, reason])[0] == "agreed":
                self._meeting += 1
        self._meeting += 1


def processes_of(mesh: Mesh | AbstractMesh) -> Alone:
    """The processes that run programs for ``mesh``; the same object every time."""
    if isinstance(mesh, AbstractMesh) or jax.process_count() == 1 or not attached(mesh):
        return ALONE
    members = tuple(sorted({device.process_index for device in mesh.devices.flat}))
    return _processes(coordination_client(), members) if len(members) > 1 else ALONE


ALONE = Alone()


@functools.cache
def _processes(store: Any, members: tuple[int, ...]) -> Processes:
    """All programs of these processes are agreed on in one sequence, whichever step they are of."""
    made = Processes(store, jax.process_index(), members)
    atexit.register(made.leave)
    return made


def _in_words(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return text if len(text) <= _REASON_CHARACTERS else text[: _REASON_CHARACTERS - 3] + "..."


_REASON_CHARACTERS = 2000
