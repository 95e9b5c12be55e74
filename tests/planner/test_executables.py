"""Executables are kept by what they were compiled from, where nobody else can put one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache

import jax_deepcompile as deepcompile
from jax_deepcompile.planner import executables
from jax_deepcompile.planner.cache import PlanCacheWarning
from jax_deepcompile.planner.executables import ExecutableCache, executables_in

STRANGER = 54321


def cache_in(folder: Path) -> ExecutableCache:
    cache = executables_in(folder)
    assert cache is not None
    return cache


def only_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def give_away(path: Path, monkeypatch) -> None:
    """``path`` belongs to somebody else."""
    if os.getuid() == 0:
        os.chown(path, STRANGER, STRANGER)
    else:
        monkeypatch.setattr(os, "getuid", lambda: STRANGER)


@pytest.mark.pure
def test_what_was_kept_is_found(tmp_path):
    cache = cache_in(tmp_path / "made" / "executables")
    assert cache.get("a") is None
    cache.put("a", b"code of a")
    cache.put("jit_<lambda>/" + "b" * 300, b"code of b")
    assert (cache.get("a"), cache.get("jit_<lambda>/" + "b" * 300)) == (b"code of a", b"code of b")
    assert cache_in(tmp_path / "made" / "executables").get("a") == b"code of a"


@pytest.mark.pure
@pytest.mark.parametrize(
    "changed",
    [
        lambda code: b"",
        lambda code: code[:-1],
        lambda code: code + b"0",
        lambda code: code[:-1] + b"b",
        lambda code: code[1:],
    ],
    ids=["empty", "cut short", "longer", "another", "its beginning lost"],
)
def test_a_file_that_is_not_what_was_kept_is_said_and_replaced(tmp_path, changed):
    cache = cache_in(tmp_path)
    cache.put("a", b"code of a")
    path = only_file(tmp_path)
    path.write_bytes(changed(path.read_bytes()))
    with pytest.warns(PlanCacheWarning, match=r"is not what was compiled for this program\. It is compiled anew\."):
        assert cache.get("a") is None
    cache.put("a", b"code of a")
    assert cache.get("a") == b"code of a"


@pytest.mark.pure
def test_another_programs_file_is_not_used(tmp_path):
    cache, other = cache_in(tmp_path / "a"), cache_in(tmp_path / "b")
    cache.put("a", b"code of a")
    other.put("b", b"code of b")
    os.replace(only_file(tmp_path / "b"), only_file(tmp_path / "a"))
    with pytest.warns(PlanCacheWarning, match="is not what was compiled for this program"):
        assert cache.get("a") is None


@pytest.mark.pure
@pytest.mark.parametrize("how", ["others may write it", "another user's", "a link"])
def test_a_file_that_others_can_change_is_not_used(tmp_path, monkeypatch, how: str):
    cache = cache_in(tmp_path / "executables")
    cache.put("a", b"code of a")
    path = only_file(tmp_path / "executables")
    if how == "others may write it":
        path.chmod(0o666)
    elif how == "another user's":
        give_away(path, monkeypatch)
    else:
        path.symlink_to(path.rename(tmp_path / "elsewhere"))
    with pytest.warns(PlanCacheWarning, match=r"others may write|belongs to another user|neither a file nor a folder"):
        assert cache.get("a") is None


@pytest.mark.pure
@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o702])
def test_a_folder_that_others_can_write_is_not_used(tmp_path, mode: int):
    (tmp_path / "executables").mkdir()
    (tmp_path / "executables").chmod(mode)
    with pytest.warns(PlanCacheWarning, match="what is compiled is not kept: others may write .*executables. Give a"):
        assert executables_in(tmp_path / "executables") is None


@pytest.mark.pure
def test_a_folder_of_somebody_else_is_not_used(tmp_path, monkeypatch):
    (tmp_path / "executables").mkdir()
    give_away(tmp_path / "executables", monkeypatch)
    with pytest.warns(PlanCacheWarning, match="belongs to another user"):
        assert executables_in(tmp_path / "executables") is None


@pytest.mark.pure
def test_in_a_shared_folder_nothing_is_kept_unless_its_entries_are_safe(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.warns(PlanCacheWarning, match="others may write .*shared"):
        assert executables_in(shared / "executables") is None
    shared.chmod(0o1777)
    assert executables_in(shared / "executables") is not None


@pytest.mark.pure
def test_a_link_is_followed_once_and_what_it_leads_to_is_judged(tmp_path):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    theirs.mkdir()
    theirs.chmod(0o777)
    for name in ("ours", "theirs"):
        (tmp_path / f"to {name}").symlink_to(tmp_path / name)
    cache = cache_in(tmp_path / "to ours")
    (tmp_path / "to ours").unlink()
    (tmp_path / "to ours").symlink_to(theirs)
    cache.put("a", b"code of a")
    assert len(list(ours.iterdir())) == 1
    with pytest.warns(PlanCacheWarning, match="others may write .*theirs"):
        assert executables_in(tmp_path / "to theirs") is None


@pytest.mark.pure
@pytest.mark.parametrize("is_of_one", [True, False])
def test_a_group_of_one_is_nobody_else(tmp_path, monkeypatch, is_of_one: bool):
    """Many systems give every user a group, and let groups write what is made."""
    monkeypatch.setattr(executables, "_is_of_one", lambda group: is_of_one)
    (tmp_path / "executables").mkdir()
    (tmp_path / "executables").chmod(0o775)
    if is_of_one:
        assert executables_in(tmp_path / "executables") is not None
    else:
        with pytest.warns(PlanCacheWarning, match="others may write"):
            assert executables_in(tmp_path / "executables") is None


@pytest.mark.pure
def test_what_is_made_is_safe_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        cache = cache_in(tmp_path / "executables")
        cache.put("a", b"code of a")
    finally:
        os.umask(before)
    assert cache_in(tmp_path / "executables").get("a") == b"code of a"


@pytest.fixture
def no_cache_of_executables():
    """JAX keeps nothing, then or afterwards; what it compiled it has forgotten."""
    config: Any = jax.config
    before = config.jax_persistent_cache_min_compile_time_secs
    reset_cache()
    jax.clear_caches()
    yield
    reset_cache()
    config.update("jax_persistent_cache_min_compile_time_secs", before)


def multiplied(factor: float, cache_dir: Path, **options) -> float:
    """What a step that multiplies returns, in a process that has not compiled it."""
    jax.clear_caches()

    @deepcompile.shard(cache_dir=cache_dir, **options)
    def step(state, batch):
        return state, factor * jnp.mean(batch)

    return float(step(np.ones((8, 8)), np.ones((8, 8)))[1])


@pytest.mark.cpu_mesh
def test_a_step_does_not_run_what_another_one_compiled(tmp_path, no_cache_of_executables):
    for factor in (2.0, 3.0):
        assert multiplied(factor, tmp_path / str(factor)) == factor
    names = [{path.name for path in (tmp_path / factor / "executables").iterdir()} for factor in ("2.0", "3.0")]
    ((two,), (three,)) = names[0] - names[1], names[1] - names[0]
    planted = (tmp_path / "2.0" / "executables" / two).read_bytes()
    (tmp_path / "3.0" / "executables" / three).write_bytes(planted)
    with pytest.warns(PlanCacheWarning, match="is not what was compiled for this program"):
        assert multiplied(3.0, tmp_path / "3.0") == 3.0
    assert multiplied(3.0, tmp_path / "3.0") == 3.0


@pytest.mark.cpu_mesh
def test_where_others_can_write_nothing_is_run_or_kept(tmp_path, no_cache_of_executables):
    tmp_path.chmod(0o777)
    with pytest.warns(PlanCacheWarning, match=f"what is compiled is not kept: others may write {tmp_path}"):
        assert multiplied(2.0, tmp_path) == 2.0
    assert list((tmp_path / "executables").iterdir()) == []


@pytest.mark.cpu_mesh
def test_a_cache_of_the_users_own_is_left_alone(tmp_path, no_cache_of_executables):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
    try:
        assert multiplied(2.0, tmp_path / "ours") == 2.0
    finally:
        jax.config.update("jax_compilation_cache_dir", None)
    assert (tmp_path / "own").exists()
    assert not (tmp_path / "ours" / "executables").exists()


@pytest.mark.h100_aot
def test_what_is_compiled_for_devices_that_are_not_here_is_not_kept(tmp_path, no_cache_of_executables):
    """It could be written, and not be read back: JAX would warn of that ever after."""
    assert multiplied(2.0, tmp_path) == 2.0
    kept = list((tmp_path / "executables").iterdir())
    mesh = deepcompile.targets.h100().make_mesh((8,), ("fsdp",))
    x = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=jax.NamedSharding(mesh, jax.P("fsdp")))
    for _ in range(2):
        jax.clear_caches()
        jax.jit(lambda x: x + 1).trace(x).lower(lowering_platforms=("cuda",)).compile()
    assert list((tmp_path / "executables").iterdir()) == kept
