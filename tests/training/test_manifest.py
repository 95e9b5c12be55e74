import pytest

from jax_deepcompile.training.manifest import MANIFEST, damage, write_manifest

pytestmark = pytest.mark.pure


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").write_bytes(b"0123456789")
    (tmp_path / "y").write_bytes(b"")
    write_manifest(tmp_path)
    return tmp_path


def test_what_was_written_is_whole(folder):
    assert damage(folder) == ""
    write_manifest(folder)
    (folder / "another").write_bytes(b"of somebody else")
    assert sorted(path.name for path in folder.iterdir()) == ["a", "another", MANIFEST, "y"]


@pytest.mark.parametrize("content", [b"0123456788", b"012345678", b"0123456789\n", b""])
def test_other_content_is_named(folder, content):
    (folder / "a" / "x").write_bytes(content)
    assert damage(folder) == "a/x is not what was written"


def test_a_file_that_is_gone_is_named(folder):
    (folder / "y").unlink()
    assert damage(folder) == "y is missing"


@pytest.mark.parametrize("content", [b"", b"{", b"3", b"[" * 100000, b"\xff"])
def test_a_manifest_that_is_damaged_is_damage(folder, content):
    (folder / MANIFEST).write_bytes(content)
    assert damage(folder) == f"{MANIFEST} is not readable"


def test_nothing_is_known_without_one(tmp_path):
    with pytest.raises(FileNotFoundError):
        damage(tmp_path)
