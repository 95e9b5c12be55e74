"""What a person sees while a run goes on: a live bar on a terminal, a line every few steps anywhere else."""

from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jax_deepcompile.training.metrics import Record, memory_in_use


class ProgressView(Protocol):
    """A context manager that is shown every record of a run."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def show(self, record: Record) -> None:
        """Takes the record of the step that has just ended."""
        ...


def progress_view(console: Console, total_steps: int, *, first_step: int, log_every_steps: int) -> ProgressView:
    """A live bar where ``console`` is a terminal, else lines."""
    if console.is_terminal:
        return LiveBar(console, total_steps=total_steps, first_step=first_step)
    return Lines(console, total_steps=total_steps, log_every_steps=log_every_steps)


class LiveBar:
    """One line, redrawn: steps done, loss, tokens/s, step time, memory, time left."""

    def __init__(self, console: Console, *, total_steps: int, first_step: int = 0):
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.description}"),
            TimeRemainingColumn(compact=True),
            console=console,
        )
        self._task = self._progress.add_task("first step", total=total_steps, completed=first_step)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def show(self, record: Record) -> None:
        """Redraws the line."""
        self._progress.update(self._task, completed=int(record["step"]), description=describe(record))


class Lines:
    """A line for the first step, for every ``log_every_steps``-th, and for the last."""

    def __init__(self, console: Console, *, total_steps: int, log_every_steps: int):
        self._console = console
        self._total_steps = total_steps
        self._log_every_steps = log_every_steps
        self._is_first = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def show(self, record: Record) -> None:
        """Prints the line if it is this step's turn."""
        step = int(record["step"])
        if self._is_first or step % self._log_every_steps == 0 or step == self._total_steps:
            self._console.print(f"step {step}/{self._total_steps}  {describe(record)}", highlight=False, soft_wrap=True)
        self._is_first = False


def describe(record: Record) -> str:
    """Loss, tokens/s, step time and memory in one short text."""
    _, owner = memory_in_use()
    return (
        f"loss {record['loss']:.3f}  {record['tokens_per_s']:,.0f} tokens/s  {record['step_s'] * 1e3:.0f} ms/step  "
        f"{record['memory_bytes'] / 2**30:.2f} GiB ({owner})"
    )
