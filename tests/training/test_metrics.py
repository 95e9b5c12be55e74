import json
import struct
from pathlib import Path

import pytest
from tensorboardX.proto.event_pb2 import Event

from jax_deepcompile.training.metrics import MetricsWriter, memory_in_use, metrics_path, read_metrics, unreadable_lines

pytestmark = pytest.mark.pure


def board_scalars(folder: Path) -> list[tuple[str, int, float]]:
    """What TensorBoard reads: (tag, step, value) of every event, from the length-prefixed records of the files."""
    scalars = []
    for path in sorted((folder / "tensorboard").iterdir()):
        content = path.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            event = Event.FromString(content[12 : 12 + length])
            scalars += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
            content = content[12 + length + 4 :]
    return scalars


def test_records_can_be_read_while_the_run_goes_on(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.write({"step": 1, "loss": 2.5})
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 2.5}]
    writer.close()


def test_tensorboard_gets_every_number_under_its_step(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.write({"step": 3, "loss": 2.5, "step_s": 0.5})
    writer.close()
    assert ("train/loss", 3, 2.5) in board_scalars(tmp_path)
    assert ("train/step_s", 3, 0.5) in board_scalars(tmp_path)


def test_resuming_drops_records_after_the_checkpoint_and_a_line_cut_short(tmp_path):
    lines = [json.dumps({"step": step, "loss": float(step)}) for step in (1, 2, 3)]
    metrics_path(tmp_path).write_text("\n".join([*lines, '{"step": 4, "lo']))
    writer = MetricsWriter(tmp_path, after_step=2)
    writer.write({"step": 3, "loss": 9.0})
    writer.close()
    assert [(record["step"], record["loss"]) for record in read_metrics(tmp_path)] == [(1, 1.0), (2, 2.0), (3, 9.0)]


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "{",
        "[" * 100_000,
        '"step"',
        "{}",
        '{"step": "2"}',
        '{"step": true}',
        '{"step": 0}',
        '{"step": 2, "loss": []}',
    ],
    ids=str.__len__,
)
def test_a_line_that_is_no_record_is_left_out_alone(tmp_path, bad):
    metrics_path(tmp_path).write_text(f'{{"step": 1, "loss": 1.5}}\n{bad}\n{{"step": 3, "loss": null}}\n')
    assert unreadable_lines(tmp_path) == [2]
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 3]


def test_a_number_json_cannot_hold_is_null(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.write({"step": 1, "loss": float("nan")})
    writer.close()
    assert json.loads(metrics_path(tmp_path).read_text()) == {"step": 1, "loss": None}


def test_processes_other_than_the_first_write_nothing(tmp_path):
    writer = MetricsWriter(tmp_path / "run", enabled=False)
    writer.write({"step": 1, "loss": 1.0})
    writer.close()
    assert not (tmp_path / "run").exists()


def test_memory_is_of_the_process_where_the_device_keeps_no_count():
    peak, owner = memory_in_use()
    assert owner in ("process", "device")
    assert peak > 2**20
