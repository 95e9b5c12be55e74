"""The input pipeline: text files, packed bytes, and a shuffled, sharded, resumable stream of batches (Grain).

A token is a byte, so the vocabulary has 256 entries, whatever the text. Documents are joined by a NUL byte, which text
does not contain. The joined bytes are cut into sequences, each overlapping the next by the one byte that is the target
of the last and the input of the next. Every n-th sequence is held out, so that the held-out text is drawn from the
whole.
"""

import dataclasses
import functools
import glob
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import grain
import numpy as np

from jax_deepcompile.runtime.modules import nearest_name
from jax_deepcompile.training.config import ConfigError, Data

VOCABULARY_SIZE = 256
DOCUMENT_SEPARATOR = b"\0"

_TEXT_SUFFIXES = (".py", ".rst", ".txt", ".md")
# Installed packages differ from machine to machine, and some distributions of Python leave the tests out.
_NOT_IN_EVERY_PYTHON = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})

Batch = dict[str, np.ndarray]


def standard_library_files() -> list[Path]:
    """The source and documentation files that ship with the running Python, sorted."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return [file for file in _text_files(root) if _NOT_IN_EVERY_PYTHON.isdisjoint(file.relative_to(root).parts)]


def find_files(patterns: Sequence[str]) -> list[Path]:
    """The files that paths, directories and globs name, sorted and each once.

    Raises:
        ConfigError: a pattern names nothing.
    """
    files: set[Path] = set()
    for pattern in patterns:
        path = Path(pattern).expanduser()
        if path.is_dir():
            matches = _text_files(path)
        elif path.is_file():
            matches = [path]
        else:
            matches = [Path(match) for match in glob.glob(str(path), recursive=True) if Path(match).is_file()]
        if not matches:
            raise ConfigError(_no_such_file(pattern, path))
        files.update(matches)
    return sorted(files)


def read_documents(files: Sequence[Path]) -> np.ndarray:
    """The bytes of all files in order, each followed by the separator, as ``uint8[bytes]``."""
    try:
        text = b"".join(file.read_bytes() + DOCUMENT_SEPARATOR for file in files)
    except OSError as error:
        raise ConfigError(f"data.files: cannot read {error.filename}: {error.strerror}") from error
    return np.frombuffer(text, np.uint8)


def unigram_entropy_nats(tokens: np.ndarray) -> float:
    r"""The entropy of the byte frequencies, :math:`-\sum_b p_b \ln p_b`: the loss of the best model without context."""
    probabilities = np.bincount(tokens, minlength=VOCABULARY_SIZE) / tokens.size
    present = probabilities[probabilities > 0]
    return float(-(present * np.log(present)).sum())


@dataclasses.dataclass(frozen=True)
class PackedSequences:
    """A random-access source of ``{"inputs": i32[length], "targets": i32[length]}`` over ``tokens_N``.

    Attributes:
        tokens_N: the packed bytes, ``uint8[N]``.
        rows: which sequences belong to this source, ``int64[sequences]``.
        length: tokens in a sequence.
    """

    tokens_N: np.ndarray
    rows: np.ndarray
    length: int

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Batch:
        start = int(self.rows[index]) * self.length
        window = self.tokens_N[start : start + self.length + 1].astype(np.int32)
        return {"inputs": window[:-1], "targets": window[1:]}


class Examples(Protocol):
    """A random-access source of ``{"inputs": ..., "targets": ...}``."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Batch: ...


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Data split for training, and what is worth knowing of them.

    Attributes:
        training: examples to train on.
        held_out: examples to evaluate on, and never train on.
        summary: what they are, in a few words.
        unigram_entropy_nats: the loss of the best model that sees the targets alone.
        fingerprint: CRC-32 of all, to refuse to resume on others.
    """

    training: Examples
    held_out: Examples
    summary: str
    unigram_entropy_nats: float
    fingerprint: int


@functools.singledispatch
def load_data(config: Any) -> Dataset:
    """The data that a config describes, a dataclass with ``batch_size`` and ``shuffle_seed``.

    It also has ``targets``, how many an example has, and ``target``, what one is called.

    Raises:
        ConfigError: a file is missing, or the data do not fill one batch of each split.
    """
    raise ConfigError(
        f"nothing loads a {type(config).__name__}: decorate a function config -> Dataset with @load_data.register, in "
        f"the module of the config or one that it imports"
    )


@load_data.register
def load_text(config: Data) -> Dataset:
    """Reads, packs and splits the text of an experiment."""
    files = find_files(config.files) if config.files else standard_library_files()
    tokens_N = read_documents(files)
    sequences = np.arange(max(tokens_N.size - 1, 0) // config.sequence_length)
    is_held_out = sequences % round(1 / config.held_out_fraction) == 0
    training, held_out = (
        PackedSequences(tokens_N, sequences[rows], config.sequence_length) for rows in (~is_held_out, is_held_out)
    )
    for split, part in (("training", training), ("held-out", held_out)):
        if len(part) < config.batch_size:
            raise ConfigError(
                f"too little text: {tokens_N.size} bytes in {len(files)} file(s) give {len(part)} {split} sequences of "
                f"{config.sequence_length} bytes, fewer than one batch of {config.batch_size}; give more files, or "
                f"lower data.sequence_length or data.batch_size"
                + (", or raise data.held_out_fraction" if part is held_out else "")
            )
    entropy_nats = unigram_entropy_nats(tokens_N)
    summary = f"{len(files):,} files, {tokens_N.size / 1e6:.1f} MB"
    return Dataset(training, held_out, summary, entropy_nats, zlib.crc32(tokens_N.data))


def training_batches(
    source: Examples, config: Any, *, process_index: int = 0, process_count: int = 1
) -> "grain.DatasetIterator[Batch]":
    """An endless iterator over this process's rows of each global batch, reshuffled every epoch.

    The processes together see the same global batches as one process would. ``get_state()`` and ``set_state()`` of the
    iterator save and restore its place exactly.
    """
    local_size = _local_batch_size(config.batch_size, process_count)
    dataset = grain.MapDataset.source(source).seed(config.shuffle_seed).shuffle().repeat()
    dataset = dataset[process_index::process_count].batch(local_size, drop_remainder=True)
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)))


def held_out_batches(
    source: Examples, config: Any, count: int, *, process_index: int = 0, process_count: int = 1
) -> Iterator[Batch]:
    """At most ``count`` batches, the same ones each time, drawn from the whole of the held-out text."""
    local_size = _local_batch_size(config.batch_size, process_count)
    dataset = grain.MapDataset.source(source).seed(config.shuffle_seed).shuffle()
    dataset = dataset[process_index::process_count].batch(local_size, drop_remainder=True)
    for index in range(min(count, len(source) // config.batch_size)):
        yield cast(Batch, dataset[index])  # None only where a filter has dropped the element


def _local_batch_size(batch_size: int, process_count: int) -> int:
    if batch_size % process_count:
        raise ConfigError(f"data.batch_size={batch_size} does not divide over {process_count} processes")
    return batch_size // process_count


def _text_files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.suffix in _TEXT_SUFFIXES and path.is_file())


def _no_such_file(pattern: str, path: Path) -> str:
    if path.is_dir():
        return f"data.files={pattern}: the directory holds no {', '.join(_TEXT_SUFFIXES)} files; name its files"
    folder = path.parent
    if not folder.is_dir():
        return f"data.files={pattern}: no such file; there is no directory {str(folder)!r}"
    nearest = nearest_name(path.name, (entry.name for entry in folder.iterdir()))
    return f"data.files={pattern}: no such file" + (f"; the nearest is {str(folder / nearest)!r}" if nearest else "")
