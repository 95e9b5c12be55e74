"""What XLA:GPU's scheduler believes an instruction takes, told by us.

The scheduler hides collectives by its own estimates of the network; where they are wrong it starts them too late. It
reads a profile instead if it is given one (``xla_gpu_pgle_profile_file_or_directory_path``), instruction by
instruction; names are the same in every compilation of one program.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jax_deepcompile.lowering.compile import Options


@dataclass(frozen=True)
class Latency:
    """What one instruction takes.

    Attributes:
      name: in the scheduled module.
      microseconds: from its start to its end.
    """

    name: str
    microseconds: float


def latency_options(latencies: Sequence[Latency]) -> Options:
    """Options that make XLA:GPU schedule by ``latencies``; none for none.

    They are written as a text ``ProfiledInstructionsProto`` to a file named by its content.
    """
    if not latencies:
        return {}
    lines = [f'costs {{ name: "{each.name}" cost_us: {each.microseconds:.3f} }}' for each in latencies]
    text = "\n".join(lines) + "\n"
    folder = Path(tempfile.gettempdir()) / "jax_deepcompile_latencies"
    folder.mkdir(exist_ok=True)
    path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.pbtxt"
    if not path.exists():
        path.write_text(text)
    return {"xla_gpu_pgle_profile_file_or_directory_path": str(path)}
