import json
import math
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from jax_deepcompile.training import data as text_data
from jax_deepcompile.training.config import ConfigError, Data
from jax_deepcompile.training.data import PackedSequences, held_out_batches, load_text, training_batches

pytestmark = pytest.mark.pure

CONFIG = Data(sequence_length=8, batch_size=4, held_out_fraction=0.1)


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "words.txt"
    path.write_bytes(bytes(np.random.default_rng(0).integers(32, 127, 999, dtype=np.uint8)))
    return path


def source(sequences: int = 10, length: int = 8) -> PackedSequences:
    tokens = np.arange(sequences * length + 1, dtype=np.int64).astype(np.uint8)
    return PackedSequences(tokens, np.arange(sequences), length)


def first_tokens(batches, count: int) -> list[list[int]]:
    """The first token of every row of each batch; in ``source()`` it names the row."""
    return [next(batches)["inputs"][:, 0].tolist() for _ in range(count)]


def test_targets_are_inputs_moved_by_one_and_no_byte_is_lost():
    rows = [source()[index] for index in range(10)]
    for row in rows:
        assert row["inputs"].dtype == row["targets"].dtype == np.int32
        np.testing.assert_array_equal(row["inputs"][1:], row["targets"][:-1])
    np.testing.assert_array_equal(np.concatenate([row["targets"] for row in rows]), np.arange(1, 81))


def test_documents_are_joined_by_a_separator(tmp_path):
    for name, text in (("b.txt", "two"), ("a.txt", "one")):
        (tmp_path / name).write_text(text)
    files = text_data.find_files([str(tmp_path)])
    assert [file.name for file in files] == ["a.txt", "b.txt"]
    assert text_data.read_documents(files).tobytes() == b"one\0two\0"


def test_find_files_takes_paths_directories_and_globs_each_file_once(tmp_path):
    (tmp_path / "sub").mkdir()
    for name in ("a.py", "b.rst", "c.bin", "sub/d.md"):
        (tmp_path / name).write_text("x")
    found = text_data.find_files(
        [str(tmp_path), str(tmp_path / "*.py"), str(tmp_path / "c.bin"), f"{tmp_path}/**/*.md"]
    )
    assert [file.relative_to(tmp_path).as_posix() for file in found] == ["a.py", "b.rst", "c.bin", "sub/d.md"]


def test_the_standard_library_is_without_installed_packages_and_tests():
    files = text_data.standard_library_files()
    root = Path(sysconfig.get_paths()["stdlib"])
    assert len(files) > 100
    assert root / "dataclasses.py" in files
    assert not any({"site-packages", "test"} & set(file.relative_to(root).parts) for file in files)
    assert files == sorted(files)


def test_entropy_is_that_of_the_byte_frequencies():
    assert text_data.unigram_entropy_nats(np.frombuffer(b"aabb", np.uint8)) == pytest.approx(math.log(2))
    assert text_data.unigram_entropy_nats(np.frombuffer(b"aaaa", np.uint8)) == 0
    every_byte = np.arange(256, dtype=np.uint8)
    assert text_data.unigram_entropy_nats(every_byte) == pytest.approx(8 * math.log(2))


def test_training_and_held_out_text_are_apart_and_together_all(text_file):
    text = load_text(Data(files=(str(text_file),), sequence_length=8, batch_size=4, held_out_fraction=0.1))
    assert text.summary == "1 files, 0.0 MB"
    training, held_out = set(text.training.rows.tolist()), set(text.held_out.rows.tolist())
    assert not training & held_out
    assert training | held_out == set(range(999 // 8))
    assert len(held_out) == 13


def test_every_epoch_has_every_row_once_and_its_own_order():
    batches = training_batches(source(12), CONFIG)
    first, second = ([row for batch in first_tokens(batches, 3) for row in batch] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(0, 96, 8))
    assert first != second
    assert first != sorted(first)


def test_the_seed_decides_the_order():
    orders = [
        first_tokens(training_batches(source(), Data(sequence_length=8, batch_size=4, shuffle_seed=seed)), 4)
        for seed in (0, 0, 1)
    ]
    assert orders[0] == orders[1] != orders[2]


def test_an_iterator_resumes_from_its_saved_state_across_an_epoch():
    batches = training_batches(source(), CONFIG)
    first_tokens(batches, 2)
    state = json.loads(json.dumps(batches.get_state()))
    expected = first_tokens(batches, 6)
    resumed = training_batches(source(), CONFIG)
    resumed.set_state(state)
    assert first_tokens(resumed, 6) == expected


def test_processes_share_out_the_batches_of_one():
    whole = first_tokens(training_batches(source(), CONFIG), 5)
    shares = [
        first_tokens(training_batches(source(), CONFIG, process_index=index, process_count=2), 5) for index in (0, 1)
    ]
    for batch, first, second in zip(whole, *shares, strict=True):
        assert len(first) == len(second) == 2
        assert sorted(first + second) == sorted(batch)


def test_held_out_batches_are_the_same_each_time_and_stop_at_the_end():
    batches = [first_tokens(held_out_batches(source(), CONFIG, 2), 2) for _ in range(2)]
    assert batches[0] == batches[1]
    assert len(list(held_out_batches(source(), CONFIG, 99))) == 10 // 4
    shares = [list(held_out_batches(source(), CONFIG, 99, process_index=i, process_count=2)) for i in (0, 1)]
    assert len(shares[0]) == len(shares[1]) == 10 // 4


def test_a_batch_that_does_not_divide_over_the_processes_is_refused():
    with pytest.raises(ConfigError, match=r"^data\.batch_size=4 does not divide over 3 processes$"):
        training_batches(source(), CONFIG, process_count=3)


def test_a_missing_file_gets_the_nearest_in_its_folder(text_file):
    wrong = text_file.with_name("wrods.txt")
    with pytest.raises(ConfigError) as caught:
        load_text(Data(files=(str(wrong),)))
    assert str(caught.value) == f"data.files={wrong}: no such file; the nearest is {str(text_file)!r}"


def test_a_missing_folder_and_an_empty_folder_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"no such file; there is no directory '.*nowhere'$"):
        text_data.find_files([str(tmp_path / "nowhere" / "a.txt")])
    with pytest.raises(ConfigError, match=r"the directory holds no \.py, \.rst, \.txt, \.md files; name its files$"):
        text_data.find_files([str(tmp_path)])


def test_too_little_text_says_how_much_there_is(text_file):
    with pytest.raises(ConfigError) as caught:
        load_text(Data(files=(str(text_file),), sequence_length=100, batch_size=16))
    assert str(caught.value) == (
        "too little text: 1000 bytes in 1 file(s) give 8 training sequences of 100 bytes, fewer than one batch of 16; "
        "give more files, or lower data.sequence_length or data.batch_size"
    )
    with pytest.raises(ConfigError, match=r"give 3 held-out sequences .* or raise data\.held_out_fraction$"):
        load_text(Data(files=(str(text_file),), sequence_length=8, batch_size=4, held_out_fraction=0.02))


def test_an_empty_file_is_too_little_text(tmp_path):
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ConfigError, match=r"^too little text: 1 bytes in 1 file\(s\) give 0 training sequences"):
        load_text(Data(files=(str(tmp_path / "empty.txt"),)))
