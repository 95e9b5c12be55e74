"""What planning makes of a small step of every model, in words: parts keep their names whatever stands beside them."""

from __future__ import annotations

import flax.linen as nn
import pytest

from models import llama
from tests.planner.golden_steps import FOLDER, LLAMA, STEPS, of_llama, printed

pytestmark = [pytest.mark.h100_aot, pytest.mark.slow]


@pytest.mark.parametrize("name", STEPS)
def test_plans_are_as_they_were(name: str):
    assert printed(STEPS[name]().plan()) == (FOLDER / f"{name}.txt").read_text()


class Graded(nn.Module):
    """A Llama, and beside it what grades its logits."""

    @nn.compact
    def __call__(self, tokens):
        logits = llama.Llama(LLAMA, name="model")(tokens)
        return logits + nn.Dense(1, name="grader")(logits)


def test_what_stands_beside_a_model_leaves_its_names_as_they_are():
    """But for where it is now, and a line of its own or a place in the lines of all."""
    lines = set(printed(of_llama(Graded()).plan()).replace("model/", "").splitlines())
    known = (FOLDER / "llama.txt").read_text().splitlines()
    assert known
    assert [line for line in known if line not in lines] == []
    assert all("grader" in line for line in lines.difference(known))
