import io

import pytest
from rich.console import Console

from jax_deepcompile.training.progress import progress_view

pytestmark = pytest.mark.pure


def record(step: int) -> dict[str, float]:
    return {"step": step, "loss": 2.5, "tokens_per_s": 12345.6, "step_s": 0.0421, "memory_bytes": 2**30}


def test_without_a_terminal_there_is_a_line_every_few_steps_and_no_control_codes():
    out = io.StringIO()
    with progress_view(Console(file=out), 7, first_step=1, log_every_steps=3) as show:
        for step in range(2, 8):
            show(record(step))
    lines = out.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["2/7", "3/7", "6/7", "7/7"]
    assert lines[0].startswith("step 2/7  loss 2.500  12,346 tokens/s  42 ms/step  1.00 GiB (")
    assert "\x1b" not in out.getvalue()


def test_on_a_terminal_there_is_one_live_line():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=150)
    with progress_view(console, 2, first_step=0, log_every_steps=3) as show:
        show(record(1))
        show(record(2))
    for part in ("first step", "2/2", "loss 2.500", "12,346 tokens/s", "42 ms/step", "1.00 GiB"):
        assert part in out.getvalue()
    assert "\x1b" in out.getvalue()
