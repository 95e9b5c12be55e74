from typing import Annotated, Literal

import jax.numpy as jnp
import pytest

from experiments.values import ConfigError, Range, check_value, parse

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("text", "annotation", "current", "expected"),
    [
        ("40", int, 1, 40),
        ("1e3", int, 1, 1000),
        ("1_000", int, 1, 1000),
        ("-3", int, 1, -3),
        ("3e-4", float, 1.0, 3e-4),
        ("2", float, 1.0, 2.0),
        ("Yes", bool, False, True),
        ("off", bool, True, False),
        ("a b", str, "", "a b"),
        ("none", int | None, 3, None),
        ("3", int | None, None, 3),
        ("7", Annotated[int, Range(1)] | None, None, 7),
        ("xla", Literal["xla", "cudnn"], "cudnn", "xla"),
        ("4", Literal[2, 4], 2, 4),
        ("a.txt, b.txt", tuple[str, ...], (), ("a.txt", "b.txt")),
        ("", tuple[int, ...], (1,), ()),
        ("bfloat16", "any", jnp.float32, jnp.bfloat16),
        ("float16", "any", jnp.dtype("float32"), jnp.dtype("float16")),
    ],
)
def test_parse_reads_every_kind_of_value(text, annotation, current, expected):
    value = parse(text, annotation, current, f"key={text}")
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("text", "annotation", "current", "sentence"),
    [
        ("4o", int, 40, "key=4o: expected an integer, for example 40"),
        ("40.4", int, 1, "key=40.4: expected an integer; the nearest is 40"),
        ("fast", float, 1e-3, "key=fast: expected a number, for example 0.001"),
        ("nan", float, 1e-3, "key=nan: expected a number that is finite, for example 0.001"),
        ("inf", int, 3, "key=inf: expected an integer that is finite, for example 3"),
        ("", int, 3, "key=: expected an integer, for example 3"),
        ("treu", bool, True, "key=treu: expected true or false; the nearest is 'true'"),
        ("0", Annotated[int, Range(1)], 5, "key=0: must be at least 1; the nearest is 1"),
        ("0", Annotated[int, Range(1)] | None, None, "key=0: must be at least 1; the nearest is 1"),
        ("1.5", Annotated[float, Range(0, 1)], 0.5, "key=1.5: must be between 0 and 1; the nearest is 1"),
        ("9", Annotated[int, Range(None, 8)], 5, "key=9: must be at most 8; the nearest is 8"),
        ("cuDNN", Literal["xla", "cudnn"], "xla", "key=cuDNN: not a choice; the choices are xla, cudnn"),
        ("cudn", Literal["xla", "cudnn"], "xla", "key=cudn: not a choice; the nearest is 'cudnn', of xla, cudnn"),
        (
            "bf16",
            "any",
            jnp.float32,
            "key=bf16: expected a dtype, one of float32, bfloat16, float16; the nearest is 'bfloat16'",
        ),
        (
            "dots",
            "any",
            print,
            "key=dots: this setting holds a builtin_function_or_method; set it in the experiment's file",
        ),
    ],
)
def test_parse_refuses_with_a_sentence(text, annotation, current, sentence):
    with pytest.raises(ConfigError) as caught:
        parse(text, annotation, current, f"key={text}")
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("value", "annotation", "sentence"),
    [
        (1.0, int, "key: expected int, not float"),
        (True, int, "key: expected int, not bool"),
        ("yes", bool, "key: expected bool, not str"),
        (None, float, "key: expected float, not NoneType"),
        (["a"], tuple[str, ...], "key: expected a tuple, not list"),
        ((1,), tuple[str, ...], "key: expected str, not int"),
    ],
)
def test_check_value_refuses_the_wrong_type(value, annotation, sentence):
    with pytest.raises(ConfigError) as caught:
        check_value(value, annotation, "key")
    assert str(caught.value) == sentence


def test_check_value_takes_an_integer_for_a_float():
    check_value(1, Annotated[float, Range(0)], "key")
