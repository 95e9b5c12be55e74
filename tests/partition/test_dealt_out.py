"""Functions of an optimizer's matrices are computed on stacks that devices divide, and nothing else is touched."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from optax import contrib

import jax_deepcompile as deepcompile
from jax_deepcompile._jax_compat import eval_local
from jax_deepcompile.ir.program import Program
from jax_deepcompile.partition.dealt_out import dealt_out
from tests.api.steps import assert_equal
from tests.cases import examples
from tests.partition.steps import (
    BATCH,
    FLAT,
    HYBRID,
    D,
    descend,
    lines,
    mlp,
    moves,
    shapes,
    trace_training,
    training_step,
)

H = 24


def newton_schulz(x, steps: int = 2):
    """Of one matrix, wide or tall."""
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    x = x / (jnp.linalg.norm(x) + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = 3.4 * x + (2.0 * gram @ gram - 4.8 * gram) @ x
    return x.T if is_tall else x


def momentum_step(function, combine=lambda new: new):
    """A step of gradients, moments written by hand, and ``function`` of each moment."""

    def step(state, batch):
        params, moments = state
        gradients = jax.grad(mlp)(params, batch)
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, gradients)
        directions = combine(jax.tree.map(function, moments))
        return (descend(params, directions), moments), 0.0

    return step


def matrices(count: int, shape=(D, D)) -> dict:
    return shapes({f"w{at}": shape for at in range(count)})


def traced_by_hand(count: int, function=newton_schulz, combine=lambda new: new):
    params = matrices(count)
    return deepcompile.shard(momentum_step(function, combine), FLAT).trace((params, params), shapes(BATCH))


def each(state, function):
    """The next state, of ``function`` of every moment."""
    params, moments = state
    moments = jax.tree.map(lambda m, p: 0.9 * m + p, moments, params)
    return params, jax.tree.map(function, moments)


def squares(state):
    return each(state, lambda m: m @ m * 2.0), 0.0


def state_of(params: dict) -> tuple:
    return params, params


def program_of(step, *args) -> Program:
    """In the global view, as partitioning is given it."""
    return deepcompile.shard(step, FLAT).trace(*args).compilation.program


def products(traced) -> list[str]:
    return [line for line in lines(traced.sharded, ("dot_general",)) if "f32[1,16,16]" in line]


def scanned(p, batch):
    x, _ = lax.scan(lambda x, layer: (x + jnp.tanh(x @ layer["up"]) @ layer["down"], None), batch["x"], p)
    return jnp.mean((x - batch["y"]) ** 2)


def muon(stacked: bool = False, **options) -> optax.GradientTransformation:
    dimensions = contrib.MuonDimensionNumbers(1, 2) if stacked else None
    numbers = (lambda params: jax.tree.map(lambda _: dimensions, params)) if stacked else None
    return contrib.muon(1e-3, muon_weight_dimension_numbers=numbers, **options)


def layers(count: int) -> dict:
    return {"up": (count, D, H), "down": (count, H, D)}


@pytest.mark.pure
class TestDealtOut:
    def test_text(self):
        program = program_of(squares, state_of(shapes({"a": (8, 8), "b": (8, 8), "c": (8, 8)})))
        assert lines(program, ("dot_general", "concatenate")) == ["dot_general f32[8,8] f32[8,8] -> f32[8,8]"] * 3
        assert lines(dealt_out(program, 4)) == [
            *["mul f32[] f32[8,8] -> f32[8,8]", "add f32[8,8] f32[8,8] -> f32[8,8]"] * 3,
            *["broadcast_in_dim f32[8,8] -> f32[1,8,8]"] * 3,
            "concatenate f32[1,8,8] f32[1,8,8] f32[1,8,8] -> f32[3,8,8]",
            "slice f32[3,8,8] -> f32[1,8,8]",
            "concatenate f32[3,8,8] f32[1,8,8] -> f32[4,8,8]",
            "dot_general f32[4,8,8] f32[4,8,8] -> f32[4,8,8]",
            "mul f32[4,8,8] f32[] -> f32[4,8,8]",
            *["slice f32[4,8,8] -> f32[1,8,8]", "squeeze f32[1,8,8] -> f32[8,8]"] * 3,
        ]

    @pytest.mark.parametrize("count", [4, 5, 9])
    def test_matrices_of_leaves(self, count):
        found = trace_training(mlp, {f"w{at}": (D, D) for at in range(count)}, BATCH, optimizer=muon())
        iterations = lines(found.sharded, ("dot_general",))[-3:]
        assert all(f"-> f32[{-(-count // 8)},1,16,16]" in line for line in iterations)
        assert any(line.startswith("all_to_all") for line in moves(found))

    @pytest.mark.parametrize("options", [{}, {"ns_coeffs": ((3.4, -4.7, 2.0), (3.0, -3.0, 1.0))}], ids=["same", "each"])
    def test_stacks_of_a_loop_over_layers(self, options):
        found = trace_training(scanned, layers(5), BATCH, optimizer=muon(stacked=True, **options))
        iterations = lines(found.sharded, ("dot_general",))[-3:]
        assert all("f32[1,16," in line for line in iterations)

    @pytest.mark.parametrize(("count", "heights"), [(12, [4, 4, 4]), (9, [4, 5]), (10, [4, 4, 2]), (4, [4])])
    def test_stacks_are_no_larger_than_they_must_be(self, monkeypatch, count, heights):
        monkeypatch.setattr("jax_deepcompile.partition.dealt_out._LEAST_BYTES", 1)
        joined = lines(dealt_out(program_of(squares, state_of(matrices(count))), 4), ("concatenate",))
        first = [line for line in joined if "f32[1,16,16]" in line.split(" -> ")[0] and "f32[1,16,16] -> " in line]
        assert [line.split(" -> ")[0].count("f32[1,16,16]") for line in first] == heights

    def test_written_by_hand(self):
        assert len(products(traced_by_hand(5))) == 6


@pytest.mark.pure
class TestLeftAlone:
    """What has other products, or too few, is the very program that it was."""

    @pytest.mark.parametrize("count", [1, 3])
    def test_few_matrices(self, count):
        self.is_left(program_of(squares, state_of(matrices(count))))

    def test_stacks_that_divide(self):
        self.is_left(program_of(squares, state_of(matrices(4, (8, D, D)))))

    def test_stacks_whose_matrices_depend_on_one_another(self):
        def step(state):
            return each(state, lambda m: jnp.cumsum(m @ m, axis=0)), 0.0

        self.is_left(program_of(step, state_of(matrices(4, (5, D, D)))))

    def test_other_matrices_beside_them(self):
        """Of two sizes, neither of which there are enough of."""
        both = matrices(3) | {f"v{at}": leaf for at, leaf in enumerate(matrices(3, (H, H)).values())}
        self.is_left(program_of(squares, state_of(both)))

    def test_moments_made_of_one_another(self):
        def step(state):
            params, moments = state
            last = jnp.zeros((D, D))
            made = {}
            for name, m in moments.items():
                made[name] = last = (0.9 * m + params[name] + last) @ jnp.eye(D)
            return (params, made), 0.0

        program = program_of(step, state_of(matrices(8)))
        assert not any("concatenate" in line for line in lines(dealt_out(program, 8)))

    def test_products_of_parameters(self):
        """Low-rank adaptations, and a penalty on what is not orthogonal."""

        def step(params, batch):
            def loss(p):
                merged = {name: p[name] @ p[name].T @ p[name] for name in p}
                return mlp(merged, batch) + sum(jnp.sum((w.T @ w - jnp.eye(D)) ** 2) for w in p.values())

            return descend(params, jax.grad(loss)(params)), 0.0

        self.is_left(program_of(step, matrices(8), shapes(BATCH)))

    def test_products_with_gradients(self):
        def step(state, batch):
            params, moments = state
            gradients = jax.grad(mlp)(params, batch)
            moments = jax.tree.map(lambda m, g: 0.9 * m + g @ g.T, moments, gradients)
            return (descend(params, jax.tree.map(lambda m, g: m @ g, moments, gradients)), moments), 0.0

        self.is_left(program_of(step, state_of(matrices(8)), shapes(BATCH)))

    @pytest.mark.parametrize("are_literals", [False, True])
    @pytest.mark.parametrize("turns", [0, 3], ids=["outside of loops", "in loops"])
    def test_functions_with_constants_of_their_own(self, turns, are_literals):
        """JAX may have them as literals, of which a jaxpr prints the shape alone."""
        scales = {f"w{at}": np.linspace(0, 1 + at, D, dtype=np.float32) for at in range(8)}

        def scaled(name, m):
            return lax.fori_loop(0, turns, lambda _, m: m @ m * scales[name], m) if turns else m @ m * scales[name]

        def step(state):
            params, moments = state
            return (params, {name: scaled(name, 0.9 * m + params[name]) for name, m in moments.items()}), 0.0

        jax.config.update("jax_use_simplified_jaxpr_constants", are_literals)
        try:
            self.is_left(program_of(step, state_of(matrices(8))))
        finally:
            jax.config.update("jax_use_simplified_jaxpr_constants", False)

    def test_decompositions(self):
        def step(state):
            return each(state, lambda m: jnp.linalg.eigh(m @ m.T)[1]), 0.0

        program = program_of(step, state_of(matrices(8)))
        assert lines(dealt_out(program, 8), ("eigh",)) == lines(program, ("eigh",))

    def is_left(self, program: Program) -> None:
        assert dealt_out(program, 8) is program


@st.composite
def functions_of_moments(draw):
    """A step without a batch whose moments are multiplied, and how many devices there are."""
    count, height = draw(st.integers(1, 5)), draw(st.none() | st.integers(1, 5))
    m, n = draw(st.sampled_from([(8, 8), (8, 12), (12, 8)]))
    function = draw(st.sampled_from([newton_schulz, _in_loop, _by_rows, lambda x: x @ x.T @ x * x.sum()]))
    function = function if height is None else jax.vmap(function)
    shape = (m, n) if height is None else (height, m, n)
    rest = {"other": jnp.ones((9, 10)), "bias": jnp.ones(10)} if draw(st.booleans()) else {}
    keys = jax.random.split(jax.random.key(draw(st.integers(0, 9))), 2 * count)
    params, moments = (
        {f"w{at}": jax.random.normal(key, shape) for at, key in enumerate(each)} | rest
        for each in (keys[:count], keys[count:])
    )

    def step(state):
        params, moments = state
        moments = jax.tree.map(lambda m, p: 0.9 * m + 0.1 * p, moments, params)
        made = {name: function(m) if name.startswith("w") else m for name, m in moments.items()}
        scale = sum(jnp.sum(value**2) for value in made.values())
        return (jax.tree.map(lambda p, u: p - u / (1 + scale), params, made), moments), scale

    return step, (params, moments), draw(st.integers(2, 9))


def _in_loop(x):
    return lax.fori_loop(0, 3, lambda at, x: x + (at + 1) * 0.1 * x @ x.T @ x, x / 10)


def _by_rows(x):
    """Reductions and broadcasts, which know sizes."""
    gram = x @ x.T
    return (gram / (1 + jnp.sum(jnp.abs(gram), axis=1, keepdims=True))) @ x - jnp.mean(x, axis=0)


@pytest.mark.pure
@examples(40)
@given(functions_of_moments())
def test_what_is_computed_stays_the_same(case):
    step, state, parts = case
    program = program_of(step, jax.eval_shape(lambda: state))
    dealt = dealt_out(program, parts)
    expected, found = (eval_local(each.jaxpr, jax.tree.leaves(state)) for each in (program, dealt))
    assert_equal(found, expected)


@pytest.mark.cpu_mesh
@pytest.mark.parametrize("mesh", [FLAT, HYBRID], ids=str)
@pytest.mark.parametrize("stacked", [False, True], ids=["leaves", "stacks"])
def test_on_devices(mesh, stacked):
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), muon(stacked))
    keys = jax.random.split(jax.random.key(0), 3)
    shape = layers(5) if stacked else {f"w{at}": (D, D) for at in range(5)}
    params = {name: 0.2 * jax.random.normal(keys[0], shape[name]) for name in shape}
    batch = {"x": jax.random.normal(keys[1], (32, D)), "y": jax.random.normal(keys[2], (32, D))}
    step = training_step(scanned if stacked else mlp, optimizer)
    found = expected = {"params": params, "opt_state": optimizer.init(params)}
    sharded = deepcompile.shard(step, mesh, donate=False)
    for _ in range(2):
        found, expected = sharded(found, batch)[0], jax.jit(step)(expected, batch)[0]
    assert_equal(found, expected)
