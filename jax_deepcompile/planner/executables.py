"""What was compiled, kept for later runs behind JAX's persistent compilation cache.

An executable is native code: it is run as whoever finds it. So it is kept only where nobody else can put one, and each
file says by a digest which program it was compiled from.
"""

from __future__ import annotations

import grp
import hashlib
import os
import pwd
import stat
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

from jax_deepcompile.planner.cache import PlanCacheWarning
from jax_deepcompile.runtime.files import write_whole

_DIGEST_BYTES = hashlib.sha256().digest_size


@dataclass(frozen=True)
class ExecutableCache:
    """Executables in a folder, by JAX's keys, of which every program, its options and its compiler have their own.

    Attributes:
      _path: the folder; JAX's caches call it so. There is nothing that a symbolic link could turn elsewhere in it.
    """

    _path: Path

    def get(self, key: str) -> bytes | None:
        """What was kept for ``key``, or None; a file that is not to be trusted is reported and left out."""
        path = self._file(key)
        try:
            why = _changeable(path)
            content = b"" if why else path.read_bytes()
        except FileNotFoundError:
            return None
        executable = content[_DIGEST_BYTES:]
        if not why and content[:_DIGEST_BYTES] != _digest(key, executable):
            why = "it is not what was compiled for this program"
        if why:
            warnings.warn(f"the executable {path} is not used: {why}. It is compiled anew.", PlanCacheWarning, 2)
            return None
        return executable

    def put(self, key: str, value: bytes) -> None:
        """Keeps ``value`` for ``key``."""
        write_whole(self._file(key), _digest(key, value) + value, mode=0o644)

    def _file(self, key: str) -> Path:
        return self._path / hashlib.sha256(key.encode()).hexdigest()


def executables_in(folder: Path) -> ExecutableCache | None:
    """The cache in ``folder``, which is made if need be; None, and a warning, where others could write what is run."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = folder.resolve()
        ways = (_changeable(folder), *(_changeable(each, is_ancestor=True) for each in folder.parents))
        why = next(filter(None, ways), "")
    except OSError as error:
        why = str(error)
    if not why:
        return ExecutableCache(folder)
    advice = "Give a cache_dir that only you can write, in folders that only you can write"
    warnings.warn(f"what is compiled is not kept: {why}. {advice}.", PlanCacheWarning, stacklevel=2)
    return None


def _digest(key: str, executable: bytes) -> bytes:
    """Of a program and its executable: a file under another's name has another's digest, and a file cut short none."""
    return hashlib.sha256(hashlib.sha256(key.encode()).digest() + executable).digest()


def _changeable(path: Path, is_ancestor: bool = False) -> str:
    """How somebody else could change ``path``, a file or a folder that is no link; empty if only root could.

    In an ancestor with the sticky bit, such as /tmp, others make entries of their own and cannot touch those there are.
    """
    found = path.lstat()
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        return f"{path} is neither a file nor a folder"
    if found.st_uid not in (0, os.getuid()):
        return f"{path} belongs to another user"
    if is_ancestor and found.st_mode & stat.S_ISVTX:
        return ""
    group_writes = found.st_mode & stat.S_IWGRP and (not _is_of_one(found.st_gid) or _lists_others(path))
    return f"others may write {path}" if group_writes or found.st_mode & stat.S_IWOTH else ""


def _is_of_one(group: int) -> bool:
    """Whether it is the user's own group, of the same name, as systems make them that let groups write by default."""
    try:
        user, named = pwd.getpwuid(os.getuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return group == user.pw_gid and named.gr_name == user.pw_name and set(named.gr_mem) <= {user.pw_name}


def _lists_others(path: Path) -> bool:
    """Whether ``path`` has an access control list, for whose users the bits of the group speak."""
    return "system.posix_acl_access" in os.listxattr(path, follow_symlinks=False) if sys.platform == "linux" else False
