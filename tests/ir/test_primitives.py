"""Views say what equations are made of, whatever the JAX version; traits are of primitives that there are."""

import importlib
import sys

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.extend import core as jex
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from jax_deepcompile._jax_compat import closed_consts, open_jaxpr
from jax_deepcompile.ir import primitives
from jax_deepcompile.ir.primitives import Collective, Cond, Scan, ShardMap, While, axis_names, called
from jax_deepcompile.ir.traversal import equations

pytestmark = pytest.mark.pure

X = jax.ShapeDtypeStruct((4, 8), jnp.float32)
ONE = jax.ShapeDtypeStruct((), jnp.float32)


def only(name, function, *args):
    (eqn,) = (eqn for eqn in equations(jax.make_jaxpr(function)(*args)) if eqn.primitive.name == name)
    return eqn


class TestTraits:
    SETS = tuple(name for name, value in vars(primitives).items() if isinstance(value, frozenset))

    @pytest.mark.parametrize("name", [*SETS, "COLLECTIVES", "_CALLED"])
    def test_are_of_primitives_that_there_are(self, name):
        for module in ("jax._src.cudnn.fused_attention_stablehlo", "jax.experimental.pallas"):
            importlib.import_module(module)
        modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "jax"]
        values = [value for module in modules for value in vars(module).values()]
        known = {value.name for value in values if isinstance(value, jex.Primitive)}
        gone, newer = {"closed_call"}, {"log2", "one_minus_square", "polynomial", "mulhi"}  # since jax 0.12, before it
        assert set(getattr(primitives, name)) - known <= gone | newer

    def test_each_word_of_the_table_makes_one_set(self):
        words = {word for traits in primitives._TRAITS.values() for word in traits.split()}
        made = [getattr(primitives, name) for name in self.SETS if name != "NAMES_AXES"]
        assert sorted(map(sorted, map(primitives._having, words))) == sorted(map(sorted, made))

    def test_no_primitive_is_in_the_table_twice(self):
        names = [name for group in primitives._TRAITS for name in group.split()]
        assert len(names) == len(set(names))

    def test_some_imply_others(self):
        assert primitives.COLLECTIVES.keys() > primitives.DEVICE_SUMS | primitives.RUNNING
        assert primitives.PRODUCTS > primitives.ATTENTION


def scan_of(num_consts: int, num_carry: int, num_xs: int, num_ys: int, reverse: bool = False):
    """A scan of three iterations; the sizes of constants, carry and slices tell them apart."""

    def run(consts, carry, xs):
        def body(carry, slices):
            total = sum((jnp.sum(each) for each in (*consts, *slices)), jnp.float32(0))
            return [each + total for each in carry], [jnp.full((30 + place,), total) for place in range(num_ys)]

        return lax.scan(body, carry, xs, length=3, reverse=reverse)

    def shapes(count, first, *stack):
        return [jax.ShapeDtypeStruct((*stack, first + place), jnp.float32) for place in range(count)]

    return only("scan", run, shapes(num_consts, 1), shapes(num_carry, 10), shapes(num_xs, 20, 3))


def sizes(atoms) -> list[int]:
    return [atom.aval.shape[-1] for atom in atoms]


class TestScan:
    @settings(max_examples=20, deadline=None)
    @given(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3), st.integers(0, 3), st.booleans())
    def test_tells_its_parts(self, num_consts, num_carry, num_xs, num_ys, reverse):
        eqn = scan_of(num_consts, num_carry, num_xs, num_ys, reverse)
        scan = Scan(eqn)
        consts, carry = list(range(1, 1 + num_consts)), list(range(10, 10 + num_carry))
        xs, ys = list(range(20, 20 + num_xs)), list(range(30, 30 + num_ys))
        read = [size for size in sizes(scan.operands.consts) if size in consts]
        assert read == consts
        assert sizes(scan.operands.carry) == sizes(scan.inputs.carry) == carry
        assert sizes(scan.operands.xs) == sizes(scan.inputs.xs) == xs
        assert sizes(scan.results.carry) == sizes(scan.outputs.carry) == carry
        assert sizes(scan.results.ys) == sizes(scan.outputs.ys) == ys
        assert (scan.num_consts, scan.num_carry) == (len(scan.operands.consts), num_carry)
        assert (scan.length, scan.reverse) == (3, reverse)
        assert [*scan.operands.consts, *scan.operands.carry, *scan.operands.xs] == eqn.invars
        assert [*scan.outputs.carry, *scan.outputs.ys] == scan.body.outvars

    def test_what_there_is_more_of_counts_as_stacks(self):
        scan = Scan(scan_of(1, 1, 1, 0))
        assert scan.split("abcd") == (["a"], ["b"], ["c", "d"])

    def test_another_body_reads_the_same_operands(self):
        scan = Scan(scan_of(1, 1, 1, 1))
        body = scan.body.replace(eqns=[])
        other = Scan(scan.with_body(body))
        assert other.body.eqns == []
        assert (other.eqn.invars, other.eqn.outvars) == (scan.eqn.invars, scan.eqn.outvars)
        assert list(closed_consts(other.closed)) == list(closed_consts(scan.closed))

    def test_the_same_body_is_the_same_equation(self):
        scan = Scan(scan_of(1, 1, 1, 1))
        assert scan.with_body(scan.body) is scan.eqn


class TestWhile:
    def test_tells_its_parts(self):
        def run(bound, step, start):
            return lax.while_loop(lambda x: jnp.sum(x) < bound, lambda x: x + step[0] * step[1], start)

        loop = While(only("while", run, ONE, (ONE, ONE), X))
        assert (loop.num_cond_consts, loop.num_body_consts) == (1, 2)
        assert loop.operands.carry == loop.eqn.invars[3:]
        assert [len(part) for part in loop.split(loop.eqn.invars)] == [1, 2, 1]
        assert len(loop.condition.invars) == 2
        assert len(loop.body.invars) == 3
        assert open_jaxpr(loop.closed_body) is loop.body


class TestCond:
    def test_tells_its_parts(self):
        branch = Cond(only("cond", lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x), X))
        assert [inner.eqns[0].primitive.name for inner in branch.branches] == ["cos", "sin"]
        assert [atom.aval.shape for atom in branch.operands] == [X.shape]


def on_mesh(function, *axes):
    mesh = AbstractMesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto, AxisType.Auto))
    return jax.shard_map(function, mesh=mesh, in_specs=PartitionSpec(*axes), out_specs=PartitionSpec(), check_vma=False)


class TestCollective:
    @pytest.mark.parametrize(
        ("name", "function", "kind", "dimension"),
        [
            ("all_gather", lambda x: lax.all_gather(x, "a", axis=1, tiled=True), "all-gather", 1),
            ("all_gather", lambda x: lax.all_gather(x, "a", axis=1), "all-gather", None),
            ("reduce_scatter", lambda x: lax.psum_scatter(x, "a", tiled=True), "reduce-scatter", 0),
            ("psum", lambda x: lax.psum(x, "a"), "all-reduce", None),
            ("pmax", lambda x: lax.pmax(x, "a"), "all-reduce", None),
            ("all_to_all", lambda x: lax.all_to_all(x, "a", 0, 1, tiled=True), "all-to-all", None),
            ("ppermute", lambda x: lax.ppermute(x, "a", [(0, 1)]), "collective-permute", None),
        ],
    )
    def test_tells_its_parts(self, name, function, kind, dimension):
        collective = Collective(only(name, on_mesh(function), X))
        assert (collective.kind, collective.axes, collective.dimension) == (kind, ("a",), dimension)

    def test_over_several_axes(self):
        assert Collective(only("psum", on_mesh(lambda x: lax.psum(x, ("b", "a"))), X)).axes == ("b", "a")

    def test_along_another_dimension(self):
        gather = Collective(only("all_gather", on_mesh(lambda x: lax.all_gather(x, "a", axis=1, tiled=True)), X))
        other = Collective(gather.along(0, gather.eqn.invars, gather.eqn.outvars))
        assert (other.dimension, other.axes, other.eqn.invars) == (0, ("a",), gather.eqn.invars)
        assert gather.dimension == 1


class TestOthers:
    def test_axes_of_what_communicates_and_what_does_not(self):
        assert axis_names(only("axis_index", on_mesh(lambda x: x * lax.axis_index("b")), X)) == ("b",)
        assert axis_names(only("reduce_sum", lambda x: jnp.sum(x, axis=1), X)) == (1,)
        assert axis_names(only("sin", jnp.sin, X)) == ()

    def test_a_shard_map(self):
        region = ShardMap(only("shard_map", on_mesh(jnp.sum, "a", "b"), X))
        assert (region.sizes, region.axes) == ({"a": 2, "b": 4}, {"a", "b"})
        assert tuple(region.in_specs) == (PartitionSpec("a", "b"),)
        assert tuple(region.out_specs) == (PartitionSpec(),)
        assert open_jaxpr(region.closed).invars[0].aval.shape == (2, 2)

    def test_what_is_called(self):
        call = only("jit", jax.jit(jnp.sin), X)
        assert [eqn.primitive.name for eqn in open_jaxpr(called(call)).eqns] == ["sin"]
        assert called(only("sin", jnp.sin, X)) is None
        assert called(scan_of(0, 1, 0, 0)) is None
