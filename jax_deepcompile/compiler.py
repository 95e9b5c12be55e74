"""The programs of a step: traced, partitioned, planned and jitted, each once for the arguments it is for."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import jax
from jax.sharding import NamedSharding

from jax_deepcompile import errors
from jax_deepcompile._jax_compat import compiles_on_gpus_only, is_tracing, user_line
from jax_deepcompile.analysis.names import with_loop_names
from jax_deepcompile.costs.devices import as_if_here, is_described, latency_bytes_of, machine_of
from jax_deepcompile.costs.entries import StepTime
from jax_deepcompile.costs.fingerprint import fingerprint, program_text
from jax_deepcompile.frontend.call import PureCall, PureStep
from jax_deepcompile.frontend.meshes import MeshUse
from jax_deepcompile.frontend.roles import Roles
from jax_deepcompile.frontend.signature import Signature
from jax_deepcompile.frontend.state_matching import Returned
from jax_deepcompile.frontend.trace import Function, Traced, abstract_key, trace_function, trace_step
from jax_deepcompile.ir.program import Role
from jax_deepcompile.ir.traversal import located_equations
from jax_deepcompile.lowering.emit import emit, sharding_of, shardings_of
from jax_deepcompile.partition.partition import Partitioned, partition_step
from jax_deepcompile.planner.limits import require_fit
from jax_deepcompile.planner.session import Planned, PlanOptions, plan_program
from jax_deepcompile.transforms.microbatch import accumulate
from jax_deepcompile.transforms.stop_alone import stop_alone

Shapes: TypeAlias = tuple[tuple[int, ...], ...]


class OtherShapes(Exception):
    """What was planned and compiled for the shapes of one call was called with others."""


@dataclass(frozen=True)
class Prepared:
    """Everything known of arguments of one structure and of these shapes.

    Attributes:
      step: the pure step.
      shapes: of the leaves of ``(*args, kwargs)``.
      traced, partitioned: for these.
      targets: where every leaf of ``(*args, kwargs)`` goes; None where it may stay.
      outputs: and every leaf of the result.
      roles: the role of every leaf.
      returned: positions of the leaves that the step returns anew.
      taken: and of those whose memory it takes.
      donated: positions of the arguments that such leaves are in.
    """

    step: PureStep
    shapes: Shapes
    traced: Traced
    partitioned: Partitioned
    targets: tuple[NamedSharding | None, ...]
    outputs: tuple[NamedSharding | None, ...]
    roles: tuple[Role, ...]
    returned: frozenset[int]
    taken: frozenset[int]
    donated: tuple[int, ...]

    @property
    def in_shardings(self) -> tuple:
        """For ``jax.jit`` of a function of ``(*args, kwargs)``."""
        positional, keywords = self.traced.in_tree.children()
        shardings, start = [], 0
        for tree in (*positional.children(), keywords):
            shardings.append(shardings_of(tree, self.targets[start : start + tree.num_leaves]))
            start += tree.num_leaves
        return tuple(shardings)

    @property
    def out_shardings(self) -> Any:
        return shardings_of(self.traced.program.out_tree, self.outputs)


@dataclass
class Launch:
    """What calls with arguments of one structure and type run, where several processes run it.

    Attributes:
      what: in words, and with a digest, that are equal in all processes that run the same.
      is_compiled: in all of them.
    """

    what: str
    is_compiled: bool = False


@dataclass(frozen=True)
class Programs:
    """What a step's calls have made so far.

    Attributes:
      name: the step's.
      use: the mesh and what its axes are for.
      roles: which arguments are what.
      microbatches: see ``shard``.
      wishes: what is planned for.
      donate: whether state's memory is taken.
    """

    name: str
    use: MeshUse
    roles: Roles
    microbatches: int
    wishes: PlanOptions
    donate: bool
    _signatures: dict[Any, Signature] = field(default_factory=dict)
    _prepared: dict[Any, Prepared] = field(default_factory=dict)
    _partitions: dict[Any, tuple[Traced, Partitioned]] = field(default_factory=dict)
    _plans: dict[int, Planned] = field(default_factory=dict)
    _runs: dict[int, Any] = field(default_factory=dict)
    _fitting: set[int] = field(default_factory=set)
    _launches: dict[Any, Launch] = field(default_factory=dict)

    def signature(self, step: PureStep, args: tuple, kwargs: dict) -> Signature:
        """What each argument is."""
        leaves, tree = jax.tree.flatten((args, kwargs))
        kinds = tuple((getattr(leaf, "shape", None), getattr(leaf, "dtype", None)) for leaf in leaves)
        key = (tree, step.structure, step.arguments, kinds)
        if key not in self._signatures:

            def returned(signature: Signature) -> Returned:
                return self._function(step, args, kwargs, signature).returned

            self._signatures[key] = self.roles.signature(self.name, step, args, kwargs, returned)
        return self._signatures[key]

    def partition(self, step: PureStep, args: tuple, kwargs: dict) -> tuple[Traced, Partitioned]:
        """The step for arguments of these shapes, and what each device does of it."""
        signature = self.signature(step, args, kwargs)
        key = (step.structure, signature, abstract_key(args, kwargs, signature))
        if key not in self._partitions:
            if self.microbatches > 1 and not (signature.batch or signature.keywords):
                raise errors.NoBatchError(self.name, self.microbatches)
            function = self._function(step, args, kwargs, signature)
            traced = trace_step(function, args, kwargs, signature, self.use.axes)
            mesh = self.use.mesh
            partitioned = partition_step(
                traced.program, mesh, self.use.state, self.use.batch, self.microbatches, latency_bytes_of(mesh)
            )
            program = with_loop_names(accumulate(stop_alone(partitioned.program, self.use.mesh), self.use.mesh))
            taken = self._taken(traced)
            program = program.replace(state_outputs=tuple(pair for pair in program.state_outputs if pair[0] in taken))
            self._partitions[key] = (traced, replace(partitioned, program=program))
        return self._partitions[key]

    def prepare(self, call: PureCall) -> Prepared:
        """What calls with arguments of this structure and these shapes have in common."""
        signature, shapes = self.signature(call.step, call.args, call.kwargs), _shapes((*call.args, call.kwargs))
        key = (
            jax.tree.structure((call.args, call.kwargs)),
            call.step.structure,
            call.step.arguments,
            signature,
            shapes,
        )
        if key not in self._prepared:
            traced, partitioned = self.partition(call.step, call.args, call.kwargs)
            program = partitioned.program
            self._prepared[key] = Prepared(
                call.step,
                shapes,
                traced,
                partitioned,
                targets=tuple(self._sharding(port, program) for port in program.inputs),
                outputs=tuple(self._sharding(port, program) for port in program.outputs),
                roles=tuple(port.role for port in program.inputs),
                returned=frozenset(source for source, _ in traced.program.state_outputs),
                taken=self._taken(traced),
                donated=traced.taken if self.donate else (),
            )
        return self._prepared[key]

    def planned(self, partitioned: Partitioned) -> Planned:
        """The partitioned program, planned."""
        if id(partitioned) not in self._plans:
            program = partitioned.program
            self._plans[id(partitioned)] = plan_program(program, self.use.mesh, self.use.platform, self.wishes)
        return self._plans[id(partitioned)]

    def planned_already(self, partitioned: Partitioned) -> Planned | None:
        """The same, if anybody asked for it before."""
        return self._plans.get(id(partitioned))

    def measured(self, partitioned: Partitioned, step: StepTime | None) -> None:
        """Keeps what the planned program took when it was run."""
        self._plans[id(partitioned)] = replace(self.planned(partitioned), measured=step)

    def run(self, prepared: Prepared) -> Any:
        """``jax.jit`` of ``(*args, kwargs) -> out``, planned; it raises OtherShapes for arguments of other shapes."""
        if id(prepared) not in self._runs:
            self._runs[id(prepared)] = self._make_run(prepared)
        return self._runs[id(prepared)]

    def require_fit(self, prepared: Prepared, args: tuple) -> None:
        """Makes sure, before its first run, that what is compiled for ``args`` keeps the memory limit.

        Raises:
          MemoryExceededError: it does not.
        """
        limit_bytes = self.planned(prepared.partitioned).limit_bytes
        if limit_bytes is None or id(prepared) in self._fitting or is_tracing():
            return
        require_fit(self.name, self.compiled(prepared, args), limit_bytes)
        self._fitting.add(id(prepared))

    def compiled(self, prepared: Prepared, args: tuple) -> jax.stages.Compiled:
        """What runs for ``args``. JAX keeps it for the run itself."""
        return self.run(prepared).lower(*args).compile()

    def launch(self, prepared: Prepared, call: PureCall) -> Launch:
        """What ``call`` runs, to agree on with other processes."""
        key = (id(prepared), _types((*call.args, call.kwargs)))
        if key not in self._launches:
            traced, partitioned = self.partition(call.step, call.args, call.kwargs)
            planned = self.planned(partitioned)
            text, options = program_text(planned.program), planned.plan.compiler_options()
            digest = fingerprint(text, machine_of(self.use.mesh), options)[:16]
            given = [port for port in traced.program.inputs if not port.role.is_state]
            shapes = [f"{port.path} {port.dtype}[{','.join(map(str, port.shape))}]" for port in given[:_SHOWN]]
            more = [f"{len(given) - _SHOWN} more"] * (len(given) > _SHOWN)
            on = f" on {', '.join(shapes + more)}" if given else ""
            self._launches[key] = Launch(f"{self.name}{on} (program {digest})")
        return self._launches[key]

    def _make_run(self, prepared: Prepared) -> Any:
        traced, step = prepared.traced, prepared.step
        planned = self.planned(prepared.partitioned)

        def staged(*args):
            if _shapes(args) != prepared.shapes:
                raise OtherShapes
            _, part = self.partition(step, args[:-1], args[-1])
            outs = emit(self.planned(part).program, self.use.mesh)(*jax.tree.leaves((args[:-1], args[-1])))
            return jax.tree.unflatten(traced.program.out_tree, outs)

        staged.__name__ = staged.__qualname__ = self.name.rsplit(".", 1)[-1]
        return jax.jit(
            staged,
            in_shardings=prepared.in_shardings,
            out_shardings=prepared.out_shardings,
            donate_argnums=prepared.donated,
            compiler_options=planned.plan.compiler_options() or None,
        )

    def _function(self, step: PureStep, args: tuple, kwargs: dict, signature: Signature) -> Function:
        """The step, traced.

        Raises:
          KernelNeedsGpuError: it has a kernel that only a machine with a GPU compiles, and is for GPUs that are not
            here.
        """
        with as_if_here(self.use.mesh):
            function = trace_function(step.fun, args, kwargs, signature)
        if is_described(self.use.mesh):
            for eqn, located in located_equations(function.closed):
                if compiles_on_gpus_only(eqn):
                    raise errors.KernelNeedsGpuError(self.name, eqn.primitive.name, user_line(located))
        return function

    def _taken(self, traced: Traced) -> frozenset[int]:
        return traced.taken_leaves if self.donate else frozenset()

    def _sharding(self, port, program) -> NamedSharding | None:
        """None, XLA's to choose, for state that may be divided over automatic axes too."""
        automatic = len(self.use.mesh.axis_names) > len(self.use.axes.names)
        return None if automatic and port.role.is_state else sharding_of(port, program, self.use.mesh)


_SHOWN = 4
"""Arguments whose shapes an error shows."""


def _types(tree: Any) -> tuple:
    """What JAX traces ``tree`` for besides its structure and shapes."""
    return tuple(
        (getattr(leaf, "dtype", type(leaf)), getattr(leaf, "weak_type", False)) for leaf in jax.tree.leaves(tree)
    )


def _shapes(tree: Any) -> Shapes:
    return tuple(getattr(leaf, "shape", ()) for leaf in jax.tree.leaves(tree))
