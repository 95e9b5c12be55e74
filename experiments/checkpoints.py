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
# Which files is a matter of their content, which the fingerprint in the checkpoint watches over.
_FREE_ON_RESUME = "data.files"


class Checkpoints:
    """The checkpoints of one run, in ``folder/checkpoints``, the newest ``train.keep_checkpoints`` of them."""

    def __init__(self, folder: Path, config: Train):
        # Synchronous: the next step donates the buffers that a background save would still be reading.
        options = ocp.CheckpointManagerOptions(
            max_to_keep=config.keep_checkpoints, enable_async_checkpointing=False, create=True
        )
        self._manager = ocp.CheckpointManager((folder / "checkpoints").absolute(), options=options)

    def save(self, step: int, state: Any, iterator_state: Any, text_fingerprint: int) -> None:
        """Saves the run after ``step`` steps, unless that checkpoint exists."""
        if step in self._manager.all_steps():
            return
        place = {"iterator": iterator_state, "text_fingerprint": text_fingerprint}
        self._manager.save(
            step, args=ocp.args.Composite(state=ocp.args.StandardSave(state), place=ocp.args.JsonSave(place))
        )

    def restore(self, state: Any, text_fingerprint: int) -> tuple[int, Any, Any]:
        """The newest checkpoint: its step, the state (placed as ``state`` is, which may be abstract), the data's place.

        Raises:
            ConfigError: there is no checkpoint, or the text is not the one it was trained on.
        """
        step = self._manager.latest_step()
        if step is None:
            raise ConfigError(f"nothing to resume: {self._manager.directory} holds no checkpoint")
        restored = self._manager.restore(
            step, args=ocp.args.Composite(state=ocp.args.StandardRestore(state), place=ocp.args.JsonRestore())
        )
        if restored["place"]["text_fingerprint"] != text_fingerprint:
            raise ConfigError("cannot resume: the text has changed since the checkpoint; give the same files in --data")
        return step, restored["state"], restored["place"]["iterator"]

    def reached_preemption(self, step: int) -> bool:
        """Whether any process of the job has had SIGTERM, and all are to stop after this step."""
        return self._manager.reached_preemption(step)

    def close(self) -> None:
        """Waits for what is still being written."""
        self._manager.close()


def claim_folder(folder: Path, experiment: Experiment, *, resume: bool, is_primary: bool = True) -> None:
    """Records the experiment in ``folder/experiment.json``, or on resuming compares it with what is recorded.

    Raises:
        ConfigError: a new run would overwrite another, or the resumed run is not the one recorded.
    """
    path = folder / "experiment.json"
    settings = {key: spell(value) for key, value in flatten(experiment).items()}
    if resume:
        if not path.exists():
            raise ConfigError(f"nothing to resume: {folder} holds no run; leave --resume out to start one")
        recorded = json.loads(path.read_text(encoding="utf-8"))
        for key, value in settings.items():
            if key.startswith(_SAME_ON_RESUME) and key != _FREE_ON_RESUME and recorded.get(key) != value:
                raise ConfigError(
                    f"cannot resume: {key} was {recorded.get(key)} and is now {value}; "
                    f"set {key}={recorded.get(key)}, or start a new run in another --out"
                )
    elif read_metrics(folder):
        raise ConfigError(f"{folder} holds a run already; add --resume to continue it, or give another --out")
    if is_primary:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def abstract(state: Any) -> Any:
    """The shapes, dtypes and shardings of a state, so that the arrays themselves can be freed before restoring."""
    return jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
