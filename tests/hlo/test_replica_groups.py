"""Groups of devices in the forms in which XLA prints them."""

from __future__ import annotations

import pytest

from jax_deepcompile import errors
from jax_deepcompile.hlo import reader as hlo
from jax_deepcompile.hlo import replica_groups

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1},{2,3}}, dimensions={0}", ((0, 1), (2, 3))),
        ("{{0,3,1,2}}", ((0, 3, 1, 2),)),
        ("{}", ((0, 1, 2, 3),)),
        ("[1,4]<=[4], channel_id=1", ((0, 1, 2, 3),)),
        ("[2,2]<=[4]", ((0, 1), (2, 3))),
        ("[2,2]<=[2,2]T(1,0)", ((0, 2), (1, 3))),
        ("mesh['axis_0'=1,'axis_1'=4] {'axis_1'}, dimensions={0}", ((0, 1, 2, 3),)),
        ("mesh['a'=2,'b'=2] {'a'}", ((0, 2), (1, 3))),
        ("mesh['a'=2,'b'=2] {'a','b'}", ((0, 1, 2, 3),)),
        ("mesh['a'=4] {'a':(1)2}", ((0, 2), (1, 3))),
        ("mesh['a'=4] {'a':(2)2}", ((0, 1), (2, 3))),
        ("mesh['a'=2,'b'=2], device_ids=([4]<=[2,2]T(1,0)) {'b'}", ((0, 2), (1, 3))),
        ("mesh['a'=2,'b'=1,'c'=2], device_ids=([2,2]T(1,0)) {'c'}", ((0, 2), (1, 3))),
    ],
)
def test_forms(text: str, groups: tuple[tuple[int, ...], ...]):
    assert replica_groups.parse(text, 4).groups == groups


@pytest.mark.parametrize("text", ["[4]", "mesh['a'=2]"])
def test_other_forms_are_refused(text: str):
    with pytest.raises(errors.MalformedHloError, match="not replica groups"):
        replica_groups.parse(text, 4)


@pytest.mark.parametrize(
    ("text", "gpus_per_node", "ranks"),
    [
        ("[1,32]<=[32]", 8, 8),
        ("[1,32]<=[32]", 32, 32),
        ("[4,8]<=[32]", 8, 8),
        ("[8,4]<=[4,8]T(1,0)", 8, 1),
        ("[2,16]<=[32]", 8, 8),
    ],
)
def test_nodes(text: str, gpus_per_node: int, ranks: int):
    assert replica_groups.parse(text, 32).ranks_per_node(gpus_per_node) == ranks


def test_of_an_instruction():
    text = """HloModule m, num_partitions=4

ENTRY %main (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  %r = f32[4]{0} all-reduce(%p), channel_id=1, replica_groups={{0,1},{2,3}}, use_global_device_ids=true
  %s = f32[4]{0} all-reduce(%r), channel_id=2
  ROOT %t = f32[4]{0} collective-permute(%s), source_target_pairs={{0,1},{1,2},{2,3}}
}
"""
    module = hlo.read(text)
    sizes = [replica_groups.of(module, step).size for step in module.entry.instructions[1:]]
    assert sizes == [2, 4, 2]
