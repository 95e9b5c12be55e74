"""What a line of ``deepcompile`` prints, kept beside the files that were read for it."""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from jax_deepcompile.cli.users_errors import is_librarys
from jax_deepcompile.runtime.files import write_whole

Ask = Callable[[Sequence[str]], str]
"""What a line prints, nothing where it fails."""


def printed_by(words: Sequence[str], ask: Ask) -> str:
    """What a line prints, that of an earlier time as long as none of the files changed that were read for it."""
    seen_from = None if words[0].startswith("-") else str(Path.cwd())
    name = hashlib.sha256(repr((__file__, seen_from, words)).encode()).hexdigest()
    file = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jax_deepcompile" / f"{name}.json"
    with suppress(OSError, ValueError, KeyError, TypeError):  # whatever the file holds
        kept = json.loads(file.read_text())
        if isinstance(kept["printed"], str) and kept["changed"] == _changed(kept["changed"]):
            return kept["printed"]
    printed = ask(words)
    if printed:
        loaded = (getattr(module, "__file__", None) for module in [*sys.modules.values()])
        read = {__file__, *(path for path in loaded if path and not is_librarys(path))}
        with suppress(OSError):
            write_whole(file, json.dumps({"changed": _changed(read), "printed": printed}), 0o600)
    return printed


def _changed(files: Iterable[str]) -> dict[str, int]:
    """When each was."""
    return {file: os.stat(file).st_mtime_ns for file in files}
