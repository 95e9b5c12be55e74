"""Plans on disk: whole, readable by whom they are shared with, and put aside where they cannot be used."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from jax_deepcompile.lowering.xla_options import DOUBLE_BUFFERING
from jax_deepcompile.planner.cache import PlanCache, PlanCacheWarning
from jax_deepcompile.planner.plan import Plan
from tests.planner.test_plan import PLAN

pytestmark = pytest.mark.pure


def test_the_cache_gives_back_what_it_was_given(tmp_path):
    cache = PlanCache(tmp_path)
    assert cache.load(PLAN.fingerprint) is None
    cache.store(PLAN)
    assert cache.load(PLAN.fingerprint) == PLAN
    assert [path.name for path in (tmp_path / "plans").iterdir()] == ["0123.json"]


def stored(folder: Path) -> Path:
    PlanCache(folder).store(PLAN)
    return folder / "plans" / "0123.json"


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{", b"\xff\xfe", json.dumps({"format": 0}).encode(), b"[" * 200_000),
        PLAN.to_json().replace("1.25", "9" * 401).encode(),
        PLAN.to_json().replace("does not compile", "\\ud800").encode(),
        PLAN.to_json().replace(DOUBLE_BUFFERING, "xla_dump_to").encode(),
        PLAN.to_json().replace("0123", "4567").encode(),
    ],
    ids=[
        "empty",
        "cut off",
        "no text",
        "another format",
        "deep",
        "401 digits",
        "surrogate",
        "option",
        "another program",
    ],
)
def test_an_entry_that_cannot_be_used_is_said_once_and_put_aside(tmp_path, content):
    cache, path = PlanCache(tmp_path), stored(tmp_path)
    path.write_bytes(content)
    with pytest.warns(PlanCacheWarning, match=r"is not used: .* It is now 0123\.unusable\. .*planned anew"):
        assert cache.load("0123") is None
    assert cache.load("0123") is None
    assert path.with_suffix(".unusable").read_bytes() == content
    cache.store(PLAN)
    assert cache.load("0123") == PLAN


def test_an_entry_that_cannot_be_put_aside_is_said(tmp_path, monkeypatch):
    path = stored(tmp_path)
    path.write_text("{")

    def refused(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", refused)
    with pytest.warns(PlanCacheWarning, match=r"It stays there \(Permission denied\)"):
        assert PlanCache(tmp_path).load("0123") is None
    assert path.exists()


def test_an_entry_that_cannot_be_opened_is_said_and_left(tmp_path, monkeypatch):
    path = stored(tmp_path)

    def refused(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refused)
    with pytest.warns(PlanCacheWarning, match=r"is not used: .*Permission denied.*planned anew"):
        assert PlanCache(tmp_path).load("0123") is None
    assert path.exists()


def test_a_pipe_that_nobody_writes_to_is_not_waited_for(tmp_path):
    path = stored(tmp_path)
    path.unlink()
    os.mkfifo(path)
    assert PlanCache(tmp_path).load("0123") is None


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077])
def test_a_plan_is_readable_by_whom_the_umask_lets(tmp_path, umask: int):
    before = os.umask(umask)
    try:
        path = stored(tmp_path)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask


@pytest.mark.parametrize("interrupted", ["write", "replace"])
@pytest.mark.parametrize("failure", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_a_plan_that_could_not_be_written_leaves_nothing(tmp_path, monkeypatch, failure, interrupted: str):
    path = stored(tmp_path)

    def fail(*_, **__):
        raise failure

    monkeypatch.setattr(os, *(("fdopen", fail) if interrupted == "write" else ("replace", fail)))
    said = pytest.warns(PlanCacheWarning, match="the plan was not kept: .*No space left")
    with said if isinstance(failure, OSError) else pytest.raises(KeyboardInterrupt):
        PlanCache(tmp_path).store(PLAN.replace(records=()))
    assert list(path.parent.iterdir()) == [path]
    assert Plan.from_json(path.read_text()) == PLAN


def test_a_cache_that_cannot_be_written_is_reported(tmp_path):
    (tmp_path / "plans").write_text("a file where the folder should be")
    with pytest.warns(PlanCacheWarning, match="the plan was not kept"):
        PlanCache(tmp_path).store(PLAN)
