import doctest
import math

import pytest

from jax_deepcompile.training import values
from jax_deepcompile.training.values import bounded

pytestmark = pytest.mark.pure


def read(text: str, *bounds: float, kind: type = int, or_none: bool = False):
    return bounded(kind, *bounds, or_none=or_none).instance_from_str([text])


def test_numbers_are_read_as_people_write_them():
    assert [read(text) for text in ("40", "1e3", "1_000", "-3")] == [40, 1000, 1000, -3]
    assert read(str(2**63 + 1)) == 2**63 + 1
    assert [read(text, kind=float) for text in ("3e-4", "2")] == [3e-4, 2.0]
    assert read("none", or_none=True) is read("None", or_none=True) is None
    assert doctest.testmod(values).failed == 0


@pytest.mark.parametrize(
    ("text", "kind", "bounds", "sentence"),
    [
        ("4o", int, (), "expected an integer, not '4o'"),
        ("40.4", int, (), "expected an integer, not '40.4'"),
        ("inf", int, (), "expected an integer, not 'inf'"),
        ("None", int, (), "expected an integer, not 'None'"),
        ("nan", float, (), "expected a number, not 'nan'"),
        ("0", int, (1,), "must be at least 1; the nearest is 1"),
        ("1.5", float, (0, 1), "must be between 0 and 1; the nearest is 1"),
        ("9", int, (-math.inf, 8), "must be at most 8; the nearest is 8"),
    ],
)
def test_what_is_no_number_or_out_of_bounds_is_refused_with_a_sentence(text, kind, bounds, sentence):
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        read(text, *bounds, kind=kind)
