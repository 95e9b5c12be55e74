"""What is said alike on every line: how a step is sharded, and on which devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from jax.sharding import Mesh
from tyro.constructors import PrimitiveConstructorSpec

from jax_deepcompile.cli.inputs import text_in
from jax_deepcompile.costs.profile import Profile
from jax_deepcompile.lowering import targets
from jax_deepcompile.options import Microbatches
from jax_deepcompile.planner.plan import Plan
from jax_deepcompile.runtime.quiet import silenced
from jax_deepcompile.training.config import AtLeastOne, AtLeastOneOrNone


def _counts(words: list[str]) -> Microbatches:
    if words == ["auto"]:
        return "auto"
    try:
        first, *others = (int(word) for word in words[0].split(","))
    except ValueError:
        raise ValueError(f"expected a number, several such as 1,2,4, or auto, not {words[0]!r}") from None
    if min(first, *others, first) < 1:
        raise ValueError("must be at least 1; the nearest is 1")
    return (first, *others) if others else first


def _counts_text(counts: Microbatches) -> list[str]:
    return [str(counts) if isinstance(counts, str | int) else ",".join(map(str, counts))]


_MICROBATCHES = PrimitiveConstructorSpec[Any](
    nargs=1,
    metavar="INT|INT,INT,..|auto",
    instance_from_str=_counts,
    is_instance=lambda value: isinstance(value, str | int | tuple),
    str_from_instance=_counts_text,
)


@dataclass(frozen=True)
class Options:
    """How a step is sharded.

    Attributes:
      microbatches: parts of each batch; of several such as 1,2,4, or of all that there may be with auto, the fastest.
      memory_limit: of each device, such as 72GiB or 0.9.
      host_memory_limit: of the host's memory for each device, such as 100GiB; 0 is none.
      passes: strategies and kinds of decisions to leave out, such as --passes=-unshard,-narrow_stacks.
      plan: file with a plan to carry out instead of making one.
      profile: file with what `deepcompile profile` measured, to plan and simulate by.
      measure: run the last few plans on the devices of this process, and take the fastest, where the command runs the
        step, as profile and validate do.
      cache_dir: where plans are kept between runs.
      devices: virtual CPU devices where there is no accelerator; 8 where it is not said.
    """

    microbatches: Annotated[Any, _MICROBATCHES] = 1
    memory_limit: str | None = None
    host_memory_limit: str | None = None
    passes: str | None = None
    plan: Path | None = None
    profile: Path | None = None
    measure: tyro.conf.FlagCreatePairsOff[bool] = False
    cache_dir: Path | None = None
    devices: AtLeastOneOrNone = None

    def of_shard(self) -> dict[str, Any]:
        """The options of ``shard`` that were said; files are read.

        Raises:
          CannotReadError: a file cannot be read.
          PlanError, ProfileFormatError: it does not hold what it should.
        """
        names = ("microbatches", "memory_limit", "host_memory_limit", "passes", "measure", "cache_dir")
        said = {name: value for name in names if (value := getattr(self, name)) != getattr(NOTHING_SAID, name)}
        if self.plan is not None:
            said["plan"] = plan_in(self.plan, "--plan")
        if self.profile is not None:
            text = text_in(self.profile, "--profile", "deepcompile profile --out FILE")
            said["profile"] = Profile.from_json(text, f"--profile {self.profile}")
        return said


NOTHING_SAID = Options()


def plan_in(file: Path, option: str) -> Plan:
    """The plan that a file holds, which ``option`` names.

    Raises:
      CannotReadError: it cannot be read.
      PlanError: it is none.
    """
    return Plan.from_json(text_in(file, option, "deepcompile plan --out FILE"), f"{option} {file}")


@dataclass(frozen=True)
class Cluster:
    """GPUs that are not here; by default the devices of this process are used.

    Attributes:
      gpu: kind of GPU.
      nodes: machines.
      gpus_per_node: in each; eight, of gh200 four, where it is not said.
      nics_per_node: network cards in each; one a GPU where it is not said.
      nic_gbps: speed of each card.
    """

    gpu: Literal["h100", "h200", "gh200", "b200"] | None = None
    nodes: AtLeastOne = 1
    gpus_per_node: AtLeastOneOrNone = None
    nics_per_node: AtLeastOneOrNone = None
    nic_gbps: float = 400.0

    @property
    def mesh(self) -> Mesh | None:
        """All devices along one axis; None for those of this process."""
        if self.gpu is None:
            return None
        make: Callable[..., targets.Target] = getattr(targets, self.gpu)
        in_each = {} if self.gpus_per_node is None else {"gpus_per_node": self.gpus_per_node}
        target = make(self.nodes, **in_each, nics_per_node=self.nics_per_node, nic_gbps=self.nic_gbps)
        with silenced():
            return target.make_mesh((target.size,), ("fsdp",))


HERE = Cluster()
