"""Files that are there whole or not at all."""

import os
import uuid
from pathlib import Path


def write_whole(path: Path, content: str | bytes, mode: int = 0o666) -> None:
    """Makes ``content`` that of ``path``; a reader, or a process killed on the way, never sees half of it.

    Where it fails, ``path`` is as it was and nothing lies beside it.

    Args:
      path: where; folders are made, and a link there is replaced, not followed.
      content: bytes, or text for UTF-8.
      mode: who may read and write it, as far as the umask lets them.

    Raises:
      OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
