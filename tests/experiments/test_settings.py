import dataclasses
from typing import Annotated

import jax.numpy as jnp
import pytest

from experiments.settings import check, flatten, override, spell
from experiments.values import ConfigError, Range

pytestmark = pytest.mark.pure


@dataclasses.dataclass(frozen=True)
class Model:
    width: int = 64
    heads: int = 4
    dtype: object = jnp.float32

    def __post_init__(self):
        if self.width % self.heads:
            raise ValueError(f"{self.heads} heads do not divide a width of {self.width}")


@dataclasses.dataclass(frozen=True)
class Data:
    files: tuple[str, ...] = ()
    batch_size: Annotated[int, Range(1)] = 16
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Config:
    model: Model = Model()
    data: Data = Data()
    seed: int = 1
    train_seed: int = 1
    other: Data = Data(seed=5)


def test_flatten_names_every_setting_in_order():
    assert flatten(Config(), "x.") == {
        "x.model.width": 64,
        "x.model.heads": 4,
        "x.model.dtype": jnp.float32,
        "x.data.files": (),
        "x.data.batch_size": 16,
        "x.data.seed": 0,
        "x.seed": 1,
        "x.train_seed": 1,
        "x.other.files": (),
        "x.other.batch_size": 16,
        "x.other.seed": 5,
    }


def test_override_sets_dotted_and_short_keys_and_leaves_the_original():
    config = Config()
    changed = override(config, ["data.batch_size=8", " width = 32 ", "dtype=bfloat16", "data.files=a,b"])
    assert changed.data == Data(batch_size=8, files=("a", "b"))
    assert changed.model == Model(width=32, dtype=jnp.bfloat16)
    assert config == Config()


def test_the_last_assignment_wins():
    assert override(Config(), ["width=32", "width=128"]).model.width == 128


def test_a_full_key_is_never_ambiguous():
    assert override(Config(), ["seed=9"]).seed == 9


def test_spelled_values_read_back():
    changed = override(Config(), ["data.files=a,b", "dtype=bfloat16", "width=32"])
    assignments = [f"{key}={spell(value)}" for key, value in flatten(changed).items()]
    assert override(Config(), assignments) == changed
    assert spell(None) == "none"


@pytest.mark.parametrize(
    ("assignment", "sentence"),
    [
        ("width", "'width' is not of the form key=value; did you mean model.width=...?"),
        ("zzz", "'zzz' is not of the form key=value"),
        ("data.batchsize=3", "data.batchsize=3: there is no key 'data.batchsize'; the nearest is 'data.batch_size'"),
        ("widht=3", "widht=3: there is no key 'widht'; the nearest is 'model.width'"),
        (
            "files=x",
            "files=x: 'files' could be data.files or other.files; write one of them in full",
        ),
        (
            "model=x",
            "model=x: 'model' is a section, not a setting; it holds model.width, model.heads, model.dtype",
        ),
        ("data.batch_size=0", "data.batch_size=0: must be at least 1; the nearest is 1"),
        ("heads=5", "heads=5: 5 heads do not divide a width of 64"),
    ],
)
def test_override_refuses_with_a_sentence(assignment, sentence):
    with pytest.raises(ConfigError) as caught:
        override(Config(), [assignment])
    assert str(caught.value) == sentence


def test_a_key_like_none_gets_the_list_of_keys():
    with pytest.raises(ConfigError, match=r"there is no key 'qqqq'; the keys are model\.width, model\.heads, "):
        override(Config(), ["qqqq=3"])


def test_check_finds_a_bad_value_written_in_python():
    with pytest.raises(ConfigError, match=r"^data\.batch_size=0: must be at least 1"):
        check(Config(data=Data(batch_size=0)))
    with pytest.raises(ConfigError, match=r"^data\.files=a: expected a tuple, not str"):
        check(Config(data=Data(files="a")))  # pyright: ignore[reportArgumentType]
    check(Config())
