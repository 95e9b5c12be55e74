"""What every file of a folder is to hold, by SHA-256: whole files of the right size can still hold other bytes."""

import hashlib
import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jax_deepcompile.runtime.files import write_whole

MANIFEST = "manifest.json"


def write_manifest(folder: Path) -> None:
    """Records in ``folder/manifest.json`` what the files in ``folder`` hold now."""
    found = (path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    names = sorted(str(path.relative_to(folder)) for path in found)
    digests = dict(zip(names, _digests(folder, names), strict=True))
    write_whole(folder / MANIFEST, json.dumps(digests, indent=1) + "\n")


def damage(folder: Path) -> str:
    """What is wrong with the files of ``folder`` by its manifest; empty where nothing is.

    Raises:
        FileNotFoundError: it has no manifest.
    """
    content = (folder / MANIFEST).read_bytes()
    try:
        digests = dict(json.loads(content))
    except (ValueError, TypeError, RecursionError):
        return f"{MANIFEST} is not readable"
    missing = [name for name in digests if not (folder / name).is_file()]
    if missing:
        return f"{missing[0]} is missing"
    garbled = [name for name, digest in zip(digests, _digests(folder, digests), strict=True) if digest != digests[name]]
    return f"{garbled[0]} is not what was written" if garbled else ""


def _digests(folder: Path, names: Iterable[str]) -> list[str]:
    with ThreadPoolExecutor() as pool:  # the digest is computed without Python's lock
        return list(pool.map(lambda name: _digest(folder / name), names))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
