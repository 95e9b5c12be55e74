"""Saving and resuming a run exactly: the sharded state, the place in the data, and the step (Orbax)."""

import json
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from experiments.config import Experiment, Train
from experiments.metrics import read_metrics
from experiments.settings import flatten, spell
from experiments.values import ConfigError

# A change of these is a different run; a change of the others (more steps, another log interval) is the same one.
_SAME_ON_RESUME = ("model.", "data.", "optimizer.")
# The files may have moved. What must not change is their content, of which the fingerprint is recorded as well.
_FREE_ON_RESUME = "data.files"
_FINGERPRINT = "data.text_fingerprint"


class Checkpoints:
    """The checkpoints of one run, in ``folder/checkpoints``, the newest ``train.keep_checkpoints`` of them."""

    def __init__(self, folder: Path, config: Train):
        # Synchronous: the next step donates the buffers that a background save would still be reading.
        options = ocp.CheckpointManagerOptions(
            max_to_keep=config.keep_checkpoints, enable_async_checkpointing=False, create=True
        )
        self._manager = ocp.CheckpointManager((folder / "checkpoints").absolute(), options=options)

    def save(self, step: int, state: Any, iterator_state: Any) -> None:
        """Saves the run after ``step`` steps, unless that checkpoint exists."""
        if step in self._manager.all_steps():
            return
        args = ocp.args.Composite(state=ocp.args.StandardSave(state), iterator=ocp.args.JsonSave(iterator_state))
        self._manager.save(step, args=args)

    def restore(self, state: Any) -> tuple[int, Any, Any]:
        """The newest checkpoint: its step, the state placed as ``state`` is, and the iterator's state.

        Args:
            state: arrays, or their shapes, dtypes and shardings (see :func:`abstract`).

        Raises:
            ConfigError: there is no checkpoint.
        """
        step = self._manager.latest_step()
        if step is None:
            raise ConfigError(f"nothing to resume: {self._manager.directory} holds no checkpoint")
        args = ocp.args.Composite(state=ocp.args.StandardRestore(state), iterator=ocp.args.JsonRestore())
        restored = self._manager.restore(step, args=args)
        return step, restored["state"], restored["iterator"]

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
        if not path.exists():
            raise ConfigError(f"nothing to resume: {folder} holds no run; leave --resume out to start one")
        _check_same_run(json.loads(path.read_text(encoding="utf-8")), settings)
        return
    if read_metrics(folder):
        raise ConfigError(f"{folder} holds a run already; add --resume to continue it, or give another --out")
    if is_primary:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _check_same_run(recorded: dict[str, str], settings: dict[str, str]) -> None:
    for key, value in settings.items():
        if not key.startswith(_SAME_ON_RESUME) or key == _FREE_ON_RESUME or recorded.get(key) == value:
            continue
        if key == _FINGERPRINT:
            raise ConfigError("cannot resume: the text has changed since the run began; give the same files in --data")
        raise ConfigError(
            f"cannot resume: {key} was {recorded.get(key)} and is now {value}; "
            f"set {key}={recorded.get(key)}, or start a new run in another --out"
        )


def abstract(state: Any) -> Any:
    """The shapes, dtypes and shardings of a state, so that the arrays themselves can be freed before restoring."""
    return jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
