"""What a person sees while a run goes on: a live bar on a terminal, a line every few steps anywhere else."""

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jax_deepcompile.training.metrics import Record, memory_in_use


@contextlib.contextmanager
def progress_view(
    console: Console, total_steps: int, *, first_step: int, log_every_steps: int
) -> Iterator[Callable[[Record], None]]:
    """Takes the record of each step that has just ended, those after ``first_step``.

    A terminal has one line, redrawn: steps done, loss, tokens/s, step time, memory, time left. Elsewhere there is one
    for the first of them, for every ``log_every_steps``-th, and for the last.
    """
    bar = Progress(
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(bar_width=24),
        TextColumn("{task.description}"),
        TimeRemainingColumn(compact=True),
        console=console,
    )
    task = bar.add_task("first step", total=total_steps, completed=first_step)

    def redraw(record: Record) -> None:
        bar.update(task, completed=int(record["step"]), description=describe(record))

    def line(record: Record) -> None:
        step = int(record["step"])
        if step in (first_step + 1, total_steps) or step % log_every_steps == 0:
            console.print(f"step {step}/{total_steps}  {describe(record)}", highlight=False, soft_wrap=True)

    with bar if console.is_terminal else contextlib.nullcontext():
        yield redraw if console.is_terminal else line


def describe(record: Record) -> str:
    """Loss, tokens/s, step time and memory in one short text."""
    _, owner = memory_in_use()
    return (
        f"loss {record['loss']:.3f}  {record['tokens_per_s']:,.0f} tokens/s  {record['step_s'] * 1e3:.0f} ms/step  "
        f"{record['memory_bytes'] / 2**30:.2f} GiB ({owner})"
    )
