"""Processes of a run as threads of one, that meet in a dictionary."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import jax

from jax_deepcompile.runtime.processes import Processes


class MemoryStore:
    """What JAX's coordination client does of all that ``Processes`` asks of it, errors included."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self._changed = threading.Condition()

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        with self._changed:
            if key in self.values and not allow_overwrite:
                raise jax.errors.JaxRuntimeError(f"ALREADY_EXISTS: key {key} already exists.")
            self.values[key] = value
            self._changed.notify_all()

    def key_value_increment(self, key: str, increment: int) -> int:
        with self._changed:
            self.values[key] = str(int(self.values.get(key, "0")) + increment)
            return int(self.values[key])

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        with self._changed:
            if self._changed.wait_for(lambda: key in self.values, timeout_in_ms / 1000):
                return self.values[key]
        raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: GetKeyValue() timed out with key: {key}")

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        with self._changed:
            return [(name, value) for name, value in self.values.items() if name.startswith(key)]

    def key_value_delete(self, key: str) -> None:
        with self._changed:
            for name in [name for name in self.values if name == key or name.startswith(f"{key}/")]:
                del self.values[name]


def processes(count: int, patience_s: float = 60.0) -> list[Processes]:
    """One object for each of ``count`` processes."""
    store = MemoryStore()
    return [Processes(store, own, tuple(range(count)), patience_s) for own in range(count)]


def outcomes(*runs: Callable[[], Any]) -> list[Any]:
    """What each of ``runs``, all at once, returns or raises; a run still waiting after a while is ``None``."""
    found: list[Any] = [None] * len(runs)

    def keep(index: int, run: Callable[[], Any]) -> None:
        try:
            found[index] = run()
        except BaseException as error:
            found[index] = error

    threads = [threading.Thread(target=keep, args=item, daemon=True) for item in enumerate(runs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return found
