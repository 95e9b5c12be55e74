"""Where the numbers of a run go: ``metrics.jsonl`` (one object a step) and TensorBoard event files."""

import json
import math
import resource
import sys
from pathlib import Path

import jax
from tensorboardX import SummaryWriter

from jax_deepcompile.runtime.files import write_whole

Record = dict[str, float]


class MetricsWriter:
    """Appends one record a step to ``metrics.jsonl`` and to ``tensorboard/``, flushed so that a reader sees it at once.

    Args:
        folder: the run's output folder.
        after_step: the step the run starts from. Records past it are of a run that was cut off after its last
            checkpoint; they will be computed again, so they are dropped first.
        enabled: False on all processes but one.
    """

    def __init__(self, folder: Path, *, after_step: int = 0, enabled: bool = True):
        self._enabled = enabled
        if not enabled:
            return
        folder.mkdir(parents=True, exist_ok=True)
        path = metrics_path(folder)
        kept = {record["step"]: record for record in read_metrics(folder) if record["step"] <= after_step}
        write_whole(path, "".join(map(_line, kept.values())))
        self._file = path.open("a", encoding="utf-8")
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=after_step + 1, flush_secs=10)

    def write(self, record: Record) -> None:
        """Writes a record, which has a ``step``."""
        if not self._enabled:
            return
        self._file.write(_line(record))
        self._file.flush()
        for name, value in record.items():
            if name != "step" and value is not None:
                self._board.add_scalar(f"train/{name}", value, int(record["step"]))

    def close(self) -> None:
        """Flushes and closes both files."""
        if self._enabled:
            self._file.close()
            self._board.close()


def metrics_path(folder: Path) -> Path:
    """The file of one JSON object a step."""
    return folder / "metrics.jsonl"


def read_metrics(folder: Path) -> list[Record]:
    """The records a run has written; lines that hold none are left out."""
    return [record for record in _records_by_line(folder) if record is not None]


def unreadable_lines(folder: Path) -> list[int]:
    """The lines, from 1, that hold no record: cut short when the run was killed, or damaged since."""
    return [number for number, record in enumerate(_records_by_line(folder), 1) if record is None]


def _records_by_line(folder: Path) -> list[Record | None]:
    if not metrics_path(folder).exists():
        return []
    return [_record(line) for line in metrics_path(folder).read_bytes().splitlines()]


def _record(line: bytes) -> Record | None:
    """The record of a line, null being a number that JSON cannot hold; none if it is something else."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):  # of which JSONDecodeError and UnicodeDecodeError are two
        return None
    if not isinstance(found, dict) or type(found.get("step")) is not int or found["step"] < 1:
        return None
    if not all(value is None or type(value) in (int, float) for value in found.values()):
        return None
    return {name: math.nan if value is None else value for name, value in found.items()}


def memory_in_use() -> tuple[int, str]:
    """Peak bytes so far, and of what: the first local device where it keeps count, else this process."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"], "device"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024, "process"


def _line(record: Record) -> str:
    finite = {name: value if math.isfinite(value) else None for name, value in record.items()}  # JSON has no NaN
    return json.dumps(finite) + "\n"
