"""Saving and resuming a run exactly: the sharded state, the place in the data, and the step (Orbax)."""

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from jax_deepcompile.runtime.files import write_whole
from jax_deepcompile.training.config import ConfigError, Experiment, Train, flatten, spell
from jax_deepcompile.training.manifest import MANIFEST, damage, write_manifest
from jax_deepcompile.training.metrics import metrics_path

# A change of these is a different run; a change of the others (more steps, another log interval) is the same one.
_SAME_ON_RESUME = ("model.", "data.", "optimizer.")
# The files may have moved. What must not change is their content, of which the fingerprint is recorded as well.
_FREE_ON_RESUME = "data.files"
_FINGERPRINT = "data.text_fingerprint"


@dataclass(frozen=True)
class Restored:
    """A run as a checkpoint has it.

    Attributes:
        step: after which it was saved.
        state: placed as was asked for.
        damaged: newer checkpoints that could not be restored, and why.
        is_checked: whether its files are known to hold what was written.
    """

    step: int
    state: Any
    damaged: Mapping[int, str]
    is_checked: bool = True

    def __str__(self) -> str:
        said = [
            f"the checkpoint after step {step} is damaged ({why}): moved to damaged_checkpoints"
            for step, why in self.damaged.items()
        ]
        unchecked = "" if self.is_checked else f", which has no {MANIFEST} to check it by"
        return "\n".join([*said, f"going on from the checkpoint after step {self.step}{unchecked}"])


class Checkpoints:
    """The checkpoints of one run, in ``folder/checkpoints``, the newest ``train.keep_checkpoints`` of them."""

    def __init__(self, folder: Path, config: Train):
        self._damaged = folder / "damaged_checkpoints"
        # Synchronous: the next step donates the buffers that a background save would still be reading.
        options = ocp.CheckpointManagerOptions(
            max_to_keep=config.keep_checkpoints,
            enable_async_checkpointing=False,
            create=True,
            cleanup_tmp_directories=True,  # what a run that was killed left half-written
        )
        self._manager = ocp.CheckpointManager(_checkpoints_of(folder), options=options)

    def save(self, step: int, state: Any, iterator_state: Any) -> None:
        """Saves the run after ``step`` steps, unless that checkpoint exists."""
        if step in self.steps():
            return
        args = ocp.args.Composite(state=ocp.args.StandardSave(state), iterator=ocp.args.JsonSave(iterator_state))
        self._manager.save(step, args=args)
        if jax.process_index() == 0:
            write_manifest(self._folder_of(step))

    def steps(self) -> list[int]:
        """The steps after which there is a checkpoint, whole or damaged; not one that was being written."""
        return sorted(self._manager.all_steps())

    def restore(self, state: Any, set_iterator: Callable[[Any], None]) -> Restored:
        """The newest checkpoint that is whole.

        Those newer than it are moved to ``damaged_checkpoints``, out of the way of what the run saves in their place.

        Args:
            state: arrays, or their shapes, dtypes and shardings (see :func:`abstract`).
            set_iterator: takes the iterator's state.

        Raises:
            ConfigError: none is whole; all stay where they are.
        """
        damaged: dict[int, str] = {}
        for step in reversed(self.steps()):
            failure, restored = self._damage(step), None
            is_whole = _everywhere(not failure)
            if is_whole:
                try:
                    restored = self._restored(step, state, set_iterator)
                except Exception as error:  # Orbax raises all kinds of them for files that are missing or garbled
                    failure = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:120]}"
                is_whole = _everywhere(restored is not None)
            if is_whole:
                is_checked = (self._folder_of(step) / MANIFEST).exists()
                self._set_aside(damaged)
                return Restored(step, restored, damaged, is_checked)
            del restored  # before its successor takes its place in memory
            damaged[step] = failure or "another process cannot restore it"
        reasons = "; ".join(f"{step}: {failure}" for step, failure in damaged.items())
        raise ConfigError(
            f"cannot resume: no checkpoint in {self._manager.directory} is whole ({reasons}); put a copy of one there, "
            f"or start a new run in another --out"
        )

    def _folder_of(self, step: int) -> Path:
        return Path(self._manager.directory) / str(step)

    def _damage(self, step: int) -> str:
        """What process 0 finds wrong with its files; nothing where a run was killed before it wrote the manifest."""
        if jax.process_index() != 0:
            return ""
        try:
            return damage(self._folder_of(step))
        except FileNotFoundError:
            return ""
        except OSError as error:
            return f"{error.filename}: {error.strerror}"

    def _restored(self, step: int, state: Any, set_iterator: Callable[[Any], None]) -> Any:
        args = ocp.args.Composite(state=ocp.args.StandardRestore(state), iterator=ocp.args.JsonRestore())
        restored = self._manager.restore(step, args=args)
        set_iterator(restored["iterator"])
        return restored["state"]

    def _set_aside(self, damaged: Iterable[int]) -> None:
        if jax.process_index() == 0:
            for step in damaged:
                aside = self._damaged / f"{step}_{time.strftime('%Y%m%d-%H%M%S')}"
                aside.parent.mkdir(exist_ok=True)
                self._folder_of(step).rename(aside)
        _everywhere(True)  # the others wait for it
        self._manager.reload()

    def reached_preemption(self, step: int) -> bool:
        """Whether any process of the job has had SIGTERM, and all are to stop after this step."""
        return self._manager.reached_preemption(step)

    def close(self) -> None:
        """Waits for what is still being written."""
        self._manager.close()


def claim_folder(
    folder: Path, experiment: Experiment, text_fingerprint: int, *, resume: bool, is_primary: bool = True
) -> None:
    """Records the experiment in ``folder/experiment.json``, or on resuming compares it with what is recorded.

    Raises:
        ConfigError: a new run would overwrite another, or the resumed run is not the one recorded.
    """
    path = folder / "experiment.json"
    settings = {key: spell(value) for key, value in flatten(experiment).items()}
    settings[_FINGERPRINT] = str(text_fingerprint)
    if resume:
        _check_same_run(_recorded(path), settings)
        return
    if _holds_run(folder):
        raise ConfigError(f"{folder} holds a run already; add --resume to continue it, or give another --out")
    if is_primary:
        try:
            write_whole(path, json.dumps(settings, indent=2) + "\n")
        except OSError as error:
            raise ConfigError(f"cannot write to {folder}: {error.strerror}; give another --out") from error


def parameters_of(folder: Path, target: Any) -> Any:
    """The parameters that the newest checkpoint of a run holds.

    Args:
        folder: of the run.
        target: shapes, dtypes and shardings of those that are wanted (see :func:`abstract`).

    Raises:
        ConfigError: there is no checkpoint, or it has no such parameters.
    """
    steps = [int(each.name) for each in _checkpoints_of(folder).glob("[0-9]*") if each.name.isdecimal()]
    if not steps:
        raise ConfigError(f"train.base={folder}: it holds no checkpoint of a run")
    saved = _checkpoints_of(folder) / str(max(steps)) / "state"
    wanted = {"params": target}
    args = ocp.args.PyTreeRestore(
        item=wanted, restore_args=ocp.checkpoint_utils.construct_restore_args(wanted), partial_restore=True
    )
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            _check_same_shapes(wanted, checkpointer.metadata(saved).item_metadata.tree)
            return checkpointer.restore(saved, args=args)["params"]
    except Exception as error:  # Orbax raises all kinds of them
        problem = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:120]}"
        raise ConfigError(f"train.base={folder}: it holds no parameters of this model ({problem})") from error


def _check_same_shapes(wanted: Any, saved: Any) -> None:
    """Before Orbax reads: it gives up at the first array that differs, in the midst of reading the others."""
    shapes = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape
        for path, leaf in jax.tree.leaves_with_path(saved)
    }
    for path, leaf in jax.tree.leaves_with_path(wanted):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if shapes.get(name) != leaf.shape:
            raise ValueError(f"{name} is {leaf.shape} here, {shapes.get(name, 'absent')} there")


def _holds_run(folder: Path) -> bool:
    """Whether there is something to lose: a step on record, a line that may have been one, or a checkpoint."""
    metrics, checkpoints = metrics_path(folder), _checkpoints_of(folder)
    if metrics.exists() and metrics.stat().st_size:
        return True
    return checkpoints.is_dir() and any(each.name.isdecimal() for each in checkpoints.iterdir())


def _recorded(path: Path) -> dict[str, Any]:
    if not path.exists() and not _holds_run(path.parent):
        raise ConfigError(f"nothing to resume: {path.parent} holds no run; leave --resume out to start one")
    try:
        recorded = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        problem = f"{type(error).__name__}: {error}"
    else:
        if isinstance(recorded, dict):
            return recorded
        problem = f"it holds a {type(recorded).__name__}, not settings"
    raise ConfigError(
        f"cannot resume: {path} does not say which run this is ({problem}); put a copy of it there, or start a new run "
        f"in another --out"
    )


def _check_same_run(recorded: dict[str, Any], settings: dict[str, str]) -> None:
    for key, value in settings.items():
        if not key.startswith(_SAME_ON_RESUME) or key == _FREE_ON_RESUME or recorded.get(key) == value:
            continue
        if key == _FINGERPRINT:
            raise ConfigError("cannot resume: the text has changed since the run began; give the same files in --data")
        raise ConfigError(
            f"cannot resume: {key} was {recorded.get(key)} and is now {value}; "
            f"add --{key.replace('_', '-')} {recorded.get(key)}, or start a new run in another --out"
        )


def _checkpoints_of(folder: Path) -> Path:
    return (folder / "checkpoints").absolute()


def _everywhere(fact: bool) -> bool:
    """Whether ``fact`` holds in all processes, once all have come here."""
    return bool(np.all(multihost_utils.process_allgather(np.bool_(fact))))


def abstract(state: Any) -> Any:
    """The shapes, dtypes and shardings of a state, so that the arrays themselves can be freed before restoring."""
    return jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
