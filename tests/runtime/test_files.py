import os

import pytest

from jax_deepcompile.runtime.files import write_whole

pytestmark = pytest.mark.pure


@pytest.mark.parametrize("content", ["new ä", "new ä".encode()])
def test_the_content_is_replaced_and_nothing_lies_beside_it(tmp_path, content):
    path = tmp_path / "made" / "results.json"
    write_whole(path, "old")
    write_whole(path, content)
    assert path.read_text("utf-8") == "new ä"
    assert os.listdir(path.parent) == ["results.json"]


@pytest.mark.parametrize("failing", ["fdopen", "replace"])
def test_what_fails_on_the_way_leaves_the_file_as_it_was(tmp_path, monkeypatch, failing):
    path = tmp_path / "results.json"
    write_whole(path, "old")

    def fail(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, failing, fail)
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["results.json"]


def test_where_a_link_leads_is_not_written_to(tmp_path):
    (tmp_path / "somebody_elses").write_text("old")
    link = tmp_path / "link"
    link.symlink_to("somebody_elses")
    write_whole(link, "new")
    assert link.read_text() == "new"
    assert (tmp_path / "somebody_elses").read_text() == "old"
