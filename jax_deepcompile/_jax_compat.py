"""The only door to ``jax._src``: one dated branch per JAX version; nothing else in the package goes through it."""

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
from jax._src import compilation_cache as _compilation_cache
from jax._src import core as _core
from jax._src import distributed as _distributed
from jax._src import pretty_printer as _pretty_printer
from jax._src import source_info_util as _source_info
from jax._src import xla_bridge as _xla_bridge
from jax._src.array import ArrayImpl
from jax._src.cudnn import fused_attention_stablehlo as _fused_attention
from jax._src.interpreters import partial_eval as _partial_eval
from jax._src.lax.lax import optimization_barrier_p
from jax._src.random.core import _gamma_one
from jax._src.state import discharge as _discharge
from jax._src.state.types import AbstractRef
from jax.experimental import topologies
from jax.extend import core as jex

_PACKAGE = f"{Path(__file__).parent}/"

_OF_LAYERS = ("flax", "haiku", "equinox", "jraph", "einops", "distrax")

_LIBRARIES = (*(f"site-packages/{name}/" for name in ("jax", "optax", *_OF_LAYERS)), _PACKAGE)
"""Where what a user calls is made of: lines there say less than the one that calls them."""

_DESCRIBED_GPU = jax.make_user_context(None)
"""(version of cuDNN, compute capability) of the GPU that this thread traces for; JAX keeps traces by it."""

_REPLACING = threading.RLock()

new_var = _core.Var
abstract_array: Any = _core.ShapedArray

__all__ = ["ArrayImpl", "optimization_barrier_p"]


def new_barrier(operands: Sequence, source_info) -> Any:
    """An ``optimization_barrier`` equation with new results."""
    held = [new_var(atom.aval) for atom in operands]
    return jex.new_jaxpr_eqn(list(operands), held, optimization_barrier_p, {}, jex.no_effects, source_info)


def rematted(source_info) -> Any:
    """``source_info`` of what is computed again, as ``jax.checkpoint`` names it."""
    return source_info.replace(name_stack=source_info.name_stack.extend("rematted_computation"))


def open_jaxpr(jaxpr) -> Any:
    """The jaxpr inside a closed one; jaxprs that are open already come back unchanged."""
    # 2026-06, jax 0.11: Jaxpr and ClosedJaxpr are one class, whose `.jaxpr` is itself.
    return jaxpr.jaxpr if hasattr(jaxpr, "jaxpr") else jaxpr


def closed_consts(jaxpr) -> Sequence:
    return getattr(jaxpr, "consts", ())


def dce(jaxpr: jex.Jaxpr) -> jex.Jaxpr:
    """``jaxpr`` without the equations that reach neither an output nor an effect; loops and branches included."""
    live, _ = _partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
    return live


@contextlib.contextmanager
def provenance(eqn) -> Iterator[None]:
    """New equations traced inside carry the position, name scope and context of ``eqn``, but the mesh of this trace."""
    name_stack = _source_info.current_name_stack() + eqn.source_info.name_stack
    here = jax.sharding.get_abstract_mesh()
    with (
        _source_info.user_context(eqn.source_info.traceback, name_stack=name_stack),
        eqn.ctx.manager,
        jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())),  # between meshes of other sizes
        jax.sharding.use_abstract_mesh(here),
    ):
        yield


def line_of(eqn) -> contextlib.AbstractContextManager:
    """New equations traced inside are of the user's line that made ``eqn``."""
    return _source_info.user_context(eqn.source_info.traceback, name_stack=_source_info.current_name_stack())


def trace_context(eqn) -> tuple:
    """What the results of ``eqn`` depend on besides its parameters and operands."""
    return eqn.ctx.compute_type, eqn.ctx.threefry_partitionable


def user_line(eqn) -> str:
    """``file:line (function)`` of the user's code that made ``eqn``: the innermost frame outside the libraries."""
    frame = _user_frame(eqn)
    return "an unknown line" if frame is None else f"{frame.file_name}:{frame.start_line} ({frame.function_name})"


def user_source(eqn) -> str:
    """``file:line`` of the same; empty where nobody knows."""
    frame = _user_frame(eqn)
    return "" if frame is None else f"{frame.file_name}:{frame.start_line}"


def users_line(line: str) -> str:
    """``line`` if it is the user's; none if it is of this package, which makes what loops carry and stack."""
    return "" if line.startswith(_PACKAGE) else line


def user_function(eqn) -> str:
    """The user's function that made ``eqn``, as Python qualifies its name; empty where all frames are libraries'."""
    frame = _user_frame(eqn)
    if frame is None or any(library in frame.file_name for library in _LIBRARIES):
        return ""
    return frame.function_name


def name_path(eqn) -> str:
    """The path of modules that ``eqn`` came from, its primitive last."""
    return "/".join(part for part in (str(eqn.source_info.name_stack), eqn.primitive.name) if part)


def _user_frame(eqn) -> Any:
    frames = _frames(eqn)
    own = [frame for frame in frames if not any(library in frame.file_name for library in _LIBRARIES)]
    return next(iter(own or frames), None)


def has_user_frame(eqn) -> bool:
    return bool(_frames(eqn))


def _frames(eqn) -> list[Any]:
    """Those outside of JAX and of this package, which calls the step that it traces."""
    frames = _source_info.user_frames(eqn.source_info.traceback)
    return [frame for frame in frames if not frame.file_name.startswith(_PACKAGE)]


def is_mutable(atom: Any) -> bool:
    """Whether an atom of a jaxpr is an array that its equations write into, as ``jax.new_ref`` makes them."""
    return isinstance(atom.aval, AbstractRef)


def without_mutables(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """``closed`` with values in the place of the mutable arrays that it makes.

    Raises:
      NotImplementedError: an equation that JAX has no rule for writes into one.
    """
    return _discharge.discharge_state(closed)


def scan_counts(eqn) -> tuple[int, int]:
    """How many operands of a ``scan`` are constants, and how many are carried."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    # 2026-06, jax 0.11: a flat tree (constants, carry, stacked inputs) took the place of the two numbers.
    consts, carry, _ = (len(list(part)) for part in eqn.params["ft_in"].update(eqn.invars).unpack())
    return consts, carry


def gamma_variables(keys: jax.Array, alphas: jax.Array, log_space: bool) -> jax.Array:
    """One of each of ``alphas`` by a key of its own; the primitive ``random_gamma`` splits every key once more."""
    # 2026-11, jax 0.10 to 0.12: what the primitive does for each sample once it has split its keys.
    drawn = jax.vmap(functools.partial(_gamma_one, log_space=log_space))(keys.reshape(-1), alphas.reshape(-1))
    return drawn.reshape(alphas.shape)


def threefry_is_partitionable() -> bool:
    return jax.config.jax_threefry_partitionable  # type: ignore[attr-defined]


def without_colors() -> contextlib.AbstractContextManager:
    """Jaxprs printed inside, and those in parameters of their equations, are plain text; on terminals they are not."""
    return _pretty_printer._PPRINT_USE_COLOR(False)


def jit_info(fun: Any) -> Any:
    """What ``jax.jit`` or ``nnx.jit`` was told, which returned ``fun``; None of other functions."""
    return getattr(getattr(fun, "jitted_fn", fun), "_jit_info", None)


def is_tracing() -> bool:
    """Whether JAX is tracing a function here and now."""
    return not _core.trace_state_clean()


def bound_axes() -> frozenset:
    """Names of the axes that functions traced here and now are mapped over."""
    return frozenset(_core.get_axis_env().axis_sizes)


def coordination_client() -> Any:
    """This process's connection to the service that all processes of a run reach."""
    return _distributed.global_state.client


def is_typed_literal(value: Any) -> bool:
    """Whether ``value`` is a number that remembers the mesh it was written down under."""
    return type(value).__name__ == "TypedNdArray"


def is_drop_var(var) -> bool:
    return isinstance(var, _core.DropVar)


def eval_local(jaxpr, values: Sequence) -> list:
    """Evaluates an open or closed jaxpr inside the current trace."""
    return _core.eval_jaxpr(open_jaxpr(jaxpr), closed_consts(jaxpr), *values)


def bind(eqn, values: Sequence) -> list:
    """Traces one equation on ``values``; it keeps its position in the user's code."""
    with provenance(eqn):
        made = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    return list(made) if eqn.primitive.multiple_results else [made]


def new_jaxpr(inputs: Sequence, outputs: Sequence, eqns: Sequence) -> jex.Jaxpr:
    """An open jaxpr without constants."""
    effects = frozenset().union(*(eqn.effects for eqn in eqns))
    names = _core.DebugInfo("jax_deepcompile", "rewritten", tuple("" for _ in inputs), tuple("" for _ in outputs))
    return jex.Jaxpr((), list(inputs), list(outputs), list(eqns), effects, names)


def has_side_effects(eqn) -> bool:
    """Whether ``eqn`` does more than compute its results; using a mesh axis's name does not count."""
    return any(not isinstance(effect, _core.NamedAxisEffect) for effect in eqn.effects)


class CacheOfExecutables(Protocol):
    """What JAX asks of its persistent compilation cache."""

    @property
    def _path(self) -> Path: ...

    def get(self, key: str) -> bytes | None: ...

    def put(self, key: str, value: bytes) -> None: ...


def keep_executables(cache: CacheOfExecutables) -> None:
    """What JAX compiles from now on is looked up in ``cache``, and kept there however fast it was compiled.

    Unless it is for devices that are not here: that can be written, but not read back.
    """
    # 2026-11, jax 0.10 to 0.12: JAX can be told a folder only, and runs what stands there under a program's name.
    _compilation_cache._cache = cache  # type: ignore[assignment]
    _compilation_cache._UNSUPPORTED_RUNTIMES.add("compile_only_runtime")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def cuda_topology_devices(name: str, config: str, topology: str, folder: Path) -> Sequence[Any]:
    """Described GPUs, which only compile; there need not be any, nor any CUDA library.

    Args:
      name, config, topology: of the topology; a text ``GpuTargetConfigProto``; slices x hosts x GPUs of each.
      folder: where the CUDA plugin is, unless it is installed.

    Raises:
      ImportError: there is no CUDA plugin.
      RuntimeError, NotImplementedError, ValueError: it does not start.
    """
    with _quiet(_xla_bridge.__name__):
        jax.devices()
    if "cuda" not in _xla_bridge._topology_factories:
        _register_cuda_compiler(folder)
    return topologies.get_topology_desc(
        topology_name=name, platform="cuda", target_config=config, topology=topology
    ).devices


@contextlib.contextmanager
def described_gpu(cudnn_version: int, compute_capability: str) -> Iterator[None]:
    """JAX's cuDNN attention, traced inside, is for a GPU that is described, and not for one of this process.

    Other threads' traces ask this process's GPUs, as they do outside.

    Args:
      cudnn_version: as cuDNN counts: 10,000 times the major version, 100 times the minor one, and the patch.
      compute_capability: such as ``9.0``.
    """
    own = _numbers(compute_capability)
    answers = {
        "check_cudnn_version": lambda: cudnn_version,
        "check_compute_capability": lambda least: own >= _numbers(least),
        "is_cuda_compute_capability_equal": lambda other: own == _numbers(other),
    }
    # 2026-11, jax 0.10 to 0.12: these three are all that attention asks while it is traced; lowering asks nothing.
    with _REPLACING, _DESCRIBED_GPU((cudnn_version, compute_capability)):
        asked = {name: getattr(_fused_attention, name) for name in answers}
        try:
            for name, answer in answers.items():
                setattr(_fused_attention, name, _in_this_thread(answer, asked[name]))
            yield
        finally:
            for name, ask in asked.items():
                setattr(_fused_attention, name, ask)


def _in_this_thread(answer: Callable, elsewhere: Callable) -> Callable:
    thread = threading.get_ident()
    return lambda *args: (answer if threading.get_ident() == thread else elsewhere)(*args)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def fuses_slices() -> bool:
    """Whether XLA:GPU makes dynamic slice fusions unless told otherwise."""
    # 2026-07, jaxlib 0.11 alone: they are on, and run a product again whose result is stacked and read.
    return importlib.metadata.version("jaxlib").startswith("0.11.")


def fuses_copies() -> bool:
    """Whether XLA:GPU makes all copies of one value at once, those that loops begin with too."""
    # 2026-11: jaxlib 0.10.2 and 0.11.2 do, 0.12.0 does not.
    return _numbers(importlib.metadata.version("jaxlib")) < (0, 12)


def hangs_on_eigenvalues() -> bool:
    """Whether XLA:CPU may wait for ever where threads share matrices whose eigenvalues are computed."""
    # 2026-11: jaxlib 0.10.2 does, 0.12.0 does not.
    return _numbers(importlib.metadata.version("jaxlib")) < (0, 12)


def compiles_on_gpus_only(eqn) -> bool:
    """Whether ``eqn`` is a Pallas kernel that Mosaic GPU compiles, and what it loads for that is not installed."""
    return _is_mosaic_gpu(eqn) and not _has_gpu_plugin()


_LIBRARY_CALLS = {
    *("cholesky", "cholesky_update", "eig", "eigh", "geqp3", "geqrf", "householder_product", "lu"),
    *("lu_pivots_to_permutation", "ormqr", "qr", "svd", "symmetric_product", "tridiagonal", "tridiagonal_solve"),
}
"""Primitives that are calls of cuSOLVER, cuSPARSE or kernels of JAX's own on GPUs, which JAX's GPU plugin registers."""


def calls_on_gpus_only(eqn) -> bool:
    """Whether ``eqn`` is a call of a library for GPUs, and what registers it with XLA is not installed."""
    return eqn.primitive.name in _LIBRARY_CALLS and not _has_gpu_plugin()


def _has_gpu_plugin() -> bool:
    return any(importlib.util.find_spec(name) for name in ("jax_cuda12_plugin", "jax_cuda13_plugin"))


def _is_mosaic_gpu(eqn) -> bool:
    if eqn.params.get("interpret"):
        return False
    if eqn.primitive.name != "pallas_call":
        return eqn.primitive.name == "mpmd_map"
    params = eqn.params["compiler_params"]
    if params is None:
        # 2026-07, jax 0.11: the option went, and what names no compiler is Triton's.
        return getattr(jax.config, "jax_pallas_use_mosaic_gpu", False)
    return type(params).__module__.startswith("jax._src.pallas.mosaic_gpu")


def _register_cuda_compiler(folder: Path) -> None:
    """Makes the CUDA plugin known, which refuses to be without a GPU's driver and libraries.

    Backends have started by now, so no client of it will: it is there to compile only.
    """
    # 2026-06, jax 0.10 to 0.12: `initialize` skips its checks where the platforms asked for leave CUDA out.
    plugin = _cuda_plugin(folder)
    asked = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_platforms", "cpu")
    try:
        with _quiet(plugin.__name__):
            plugin.initialize()
    finally:
        jax.config.update("jax_platforms", asked)
    # Plugins that JAX finds when it starts get these then: attention by cuDNN is partitioned by one of them.
    for callback in _xla_bridge._plugin_callbacks:
        callback(c_api=_xla_bridge._backend_factories["cuda"].c_api)


def _cuda_plugin(folder: Path) -> Any:
    for name in ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13"):
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(name)
    name = "jax_plugins.xla_cuda12"
    found = importlib.util.spec_from_file_location(name, folder.joinpath(*name.split("."), "__init__.py"))
    if found is None or found.loader is None or not Path(found.origin or "").exists():
        raise ImportError("neither jax-cuda12-pjrt nor jax-cuda13-pjrt is installed")
    plugin = importlib.util.module_from_spec(found)
    found.loader.exec_module(plugin)
    return plugin


@contextlib.contextmanager
def _quiet(name: str) -> Iterator[None]:
    """The logger ``name`` says nothing inside."""
    logger = logging.getLogger(name)
    was = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = was
