"""What layers that no loop runs leave for backward comes back from the host as the same bits."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.analysis.segments import Tape
from jax_deepcompile.costs.program_memory import memory_of_program
from jax_deepcompile.hlo.reader import read
from jax_deepcompile.ir.memory import is_fetch, is_offload
from jax_deepcompile.ir.program import Program
from jax_deepcompile.lowering.compile import compile_options, copies_at_once
from jax_deepcompile.lowering.emit import lower
from jax_deepcompile.transforms import carry_out
from jax_deepcompile.transforms.offload_values import OffloadedValues, offloadable
from jax_deepcompile.transforms.rematerialize_segments import segments_of
from tests.cases import examples
from tests.schedules import products_beside_copies
from tests.transforms.programs import STACK, assert_same_values, count, h100s, outline, sharded
from tests.transforms.test_rematerialize_segments import BATCH, LOSSES, PLAIN, TWO, two_blocks_loss


def known(program: Program) -> list[str]:
    return list(offloadable(Tape(open_jaxpr(program.jaxpr)), phased=True))


@pytest.mark.pure
def test_before_and_after():
    program, mesh = sharded(two_blocks_loss, TWO, BATCH)
    assert "device_put" not in outline(program, "device_put")
    values = tuple(name for name in known(program) if "tanh" in name)
    after = carry_out(program, mesh, [OffloadedValues("", values)])
    gather, product, reduce, copy = "all_gather", "dot_general", "reduce_scatter", "device_put"
    forward = 2 * [gather, product, "tanh", copy, gather, product]
    rest = [gather, product, product, reduce]
    head = [copy, product, copy, reduce, product, product, reduce]
    assert outline(after, "tanh", copy) == [*forward, *head, *rest, *rest]
    ways = [[way(eqn) for way in (is_offload, is_fetch)] for eqn in open_jaxpr(after.jaxpr).eqns]
    assert [each for each in ways if any(each)] == 2 * [[True, False]] + 2 * [[False, True]]


@pytest.mark.cpu_mesh
@pytest.mark.parametrize(
    ("name", "again"),
    [
        ("layers", False),
        pytest.param("mask", True, marks=pytest.mark.slow),
        ("dropout", True),
        ("U", False),
        ("loops inside", False),
        pytest.param("inner gradient", True, marks=pytest.mark.slow),
    ],
)
def test_values_stay_the_same(name, again):
    program, mesh = sharded(LOSSES[name], STACK, BATCH)
    start = carry_out(program, mesh, [choice for choice, _ in segments_of(program)]) if again else program
    values = known(start)
    after = carry_out(start, mesh, [OffloadedValues("", tuple(values))])
    assert count(after, "device_put") >= 2 * len(values)
    assert_same_values(after, program, mesh)


@pytest.mark.cpu_mesh
def test_in_every_microbatch_values_stay_the_same():
    program, mesh = sharded(PLAIN, STACK, BATCH, microbatches=2)
    ((choice, _),) = segments_of(program)
    after = carry_out(program, mesh, [choice, OffloadedValues(choice.where, choice.inputs)])
    assert count(after, "device_put") == 2 * 2 * len(choice.inputs)
    assert_same_values(after, program, mesh)


@pytest.mark.pure
@examples(8)
@given(st.sampled_from(sorted(LOSSES)), st.randoms(use_true_random=False))
def test_each_value_is_copied_once_each_way(name, random):
    program, mesh = sharded(LOSSES[name], STACK, BATCH)
    values = random.sample(known(program), random.randint(1, len(known(program))))
    eqns = open_jaxpr(carry_out(program, mesh, [OffloadedValues("", tuple(values))]).jaxpr).eqns
    assert sum(map(is_offload, eqns)) == sum(map(is_fetch, eqns)) == len(values)


@pytest.mark.h100_aot
def test_compiled_copies_run_beside_products():
    wide = {f"layer{at}": {"up": (1024, 4096), "down": (4096, 1024)} for at in range(12)}

    def loss(params, x):
        for each in wide:
            x = x + jnp.tanh(x @ params[each]["up"]) @ params[each]["down"]
        return jnp.mean(x**2)

    program, mesh = sharded(loss, wide, (1 << 15, 1024), h100s())
    ((choice, _),) = segments_of(program)
    away = choice.inputs[:-2]  # the last ones are read at once
    planned = carry_out(program, mesh, [choice, OffloadedValues("", away)])
    compiled = lower(planned, mesh, "cuda").compile(compiler_options=compile_options("cuda") | copies_at_once())
    beside = products_beside_copies(read(compiled.as_text() or "").entry)
    assert len(beside) == 2 * len(away)
    assert min(beside) >= 4
    size = 4 * (1 << 15) // 8 * 1024 * len(away)
    assert compiled.memory_analysis().host_temp_size_in_bytes == pytest.approx(size, rel=0.03)


@pytest.mark.pure
def test_the_device_has_less():
    program, mesh = sharded(PLAIN, STACK, BATCH)
    after = carry_out(program, mesh, [OffloadedValues("", tuple(known(program)))])
    assert memory_of_program(after).live_peak_bytes < memory_of_program(program).live_peak_bytes
