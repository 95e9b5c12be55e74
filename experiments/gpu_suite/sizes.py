"""What each section measures, as data: at full size for a GPU, and tiny, the same code, for any machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from models.llama import LLAMA3_8B, LLAMA3_70B, LLAMA_TINY, LlamaConfig

MIB = 1 << 20

LLAMA_SMALLEST = dataclasses.replace(
    LLAMA_TINY, d_model=16, n_layers=1, n_heads=2, n_kv_heads=1, d_ff=16, remat_policy=None
)
"""Compiles in a second."""


@dataclass(frozen=True)
class Effort:
    """How long a figure is measured.

    Attributes:
      sample_s: a sample is as many calls in a row as take about so long.
      samples: the median of so many counts.
      call_s: a call repeats a short operation until it takes about so long, which hides what calling costs.
      most_repeats: but not more often than this.
    """

    sample_s: float = 0.015
    samples: int = 5
    call_s: float = 3e-4
    most_repeats: int = 32


@dataclass(frozen=True)
class MatmulSizes:
    """Shapes (m, n, k) by element type and form, the most telling first.

    Attributes:
      shapes: in bfloat16, form ``nn``.
      transposed_shapes: in bfloat16, forms ``nt`` and ``tn``.
      float32_shapes: in float32 at JAX's default precision, form ``nn``.
      expected_flops_per_s: by which short products are told from long ones.
    """

    shapes: tuple[tuple[int, int, int], ...]
    transposed_shapes: tuple[tuple[int, int, int], ...]
    float32_shapes: tuple[tuple[int, int, int], ...]
    expected_flops_per_s: float = 5e14


@dataclass(frozen=True)
class AttentionSizes:
    """One sequence a call.

    Attributes:
      heads: by name, (query heads, key/value heads, channels of a head).
      sequences: tokens, the most telling first.
    """

    heads: tuple[tuple[str, tuple[int, int, int]], ...]
    sequences: tuple[int, ...]
    expected_flops_per_s: float = 3e14


@dataclass(frozen=True)
class MemorySizes:
    """Float32 matrices.

    Attributes:
      sizes_bytes: of one matrix.
      columns: of each.
      tiny_kernels: in a row, in one program.
    """

    sizes_bytes: tuple[int, ...]
    columns: int = 4096
    tiny_kernels: int = 256
    expected_bytes_per_s: float = 2.5e12


@dataclass(frozen=True)
class HostCopySizes:
    """Copies between device and pinned host memory.

    Attributes:
      sizes_bytes: of copies alone.
      overlap_bytes: of the copy beside kernels.
      product_size: of the square matrices of those.
      kernels: how many products, in one program.
    """

    sizes_bytes: tuple[int, ...]
    overlap_bytes: int
    product_size: int
    kernels: int


@dataclass(frozen=True)
class BlockSizes:
    """Layers of a Llama, profiled one after another.

    Attributes:
      layers: of each the sizes.
      sequence: tokens.
      runs: traced; the median counts.
      heaviest: so many ops are listed one by one.
    """

    layers: tuple[LlamaConfig, ...]
    sequence: int
    runs: int = 5
    heaviest: int = 12


@dataclass(frozen=True)
class StepSizes:
    """Whole train steps, by the names they have in ``workloads``.

    Attributes:
      workloads: their names.
      samples: of some steps in a row; the median counts.
      sample_s: they take about so long.
      runs: traced; the median counts.
      heaviest: so many ops are listed one by one.
    """

    workloads: tuple[str, ...]
    samples: int = 5
    sample_s: float = 0.4
    runs: int = 3
    heaviest: int = 12


@dataclass(frozen=True)
class OffloadSizes:
    """A Llama that is trained with some of it on the host.

    Attributes:
      model: its sizes, but for its layers.
      layers: the fewest and the most.
      sequence: tokens an example.
      examples: a step.
      copy_bytes: of copies both ways at once.
      steps: that count.
      memory_fraction: of the GPU, that each way to train may take.
    """

    model: LlamaConfig
    layers: tuple[int, int]
    sequence: int
    examples: int
    copy_bytes: int
    steps: int = 20
    memory_fraction: float = 0.94


@dataclass(frozen=True)
class PairSizes:
    """Two processes that train one small Llama.

    Attributes:
      model: its sizes.
      batch: examples in both processes together.
      sequence: tokens an example.
      loss_steps: whose losses are compared.
      samples: of each way to run it, in turn; the median counts.
      steps: a sample.
      memory_fraction: of the GPU, that each process may take.
    """

    model: LlamaConfig
    batch: int
    sequence: int
    loss_steps: int = 3
    samples: int = 5
    steps: int = 2
    memory_fraction: float = 0.4


@dataclass(frozen=True)
class Budgets:
    """Seconds. A section may take what the sections before it did not need.

    Attributes:
      sections_s: by section, in order.
      grace_s: after its section's time is over, until a case is ended.
    """

    sections_s: tuple[tuple[str, float], ...]
    grace_s: float = 12.0

    def until_s(self, section: str) -> float:
        """From the beginning of the suite to the end of a section's time."""
        names = [name for name, _ in self.sections_s]
        return sum(seconds for _, seconds in self.sections_s[: names.index(section) + 1])


@dataclass(frozen=True)
class Sizes:
    """All of the suite.

    Attributes:
      name: in ``SIZES``.
    """

    name: str
    effort: Effort
    matmul: MatmulSizes
    attention: AttentionSizes
    memory: MemorySizes
    host_copies: HostCopySizes
    llama_block: BlockSizes
    steps: StepSizes
    pair: PairSizes
    offload: OffloadSizes
    budgets: Budgets


def layer_shapes(model: LlamaConfig, tokens: int) -> tuple[tuple[int, int, int], ...]:
    """(m, n, k) of a forward pass of one layer, and of the output layer: query, key, gate, down, head."""
    width = model.d_model
    return (
        (tokens, width, width),
        (tokens, model.n_kv_heads * model.head_dim, width),
        (tokens, model.d_ff, width),
        (tokens, width, model.d_ff),
        (tokens, model.vocab_size, width),
    )


def full() -> Sizes:
    """For one GPU of 80 GB, in less than eight minutes."""
    squares = tuple((size, size, size) for size in (4096, 8192, 1024, 2048, 16_384, 512))
    layers = tuple(
        shape
        for tokens in (2048, 8192, 1024, 4096)
        for model in (LLAMA3_8B, LLAMA3_70B)
        for shape in layer_shapes(model, tokens)
    )
    block = dataclasses.replace(LLAMA3_8B, vocab_size=32_000, remat_policy=None)
    return Sizes(
        "full",
        effort=Effort(),
        matmul=MatmulSizes(
            tuple(dict.fromkeys((*squares, *layers))),
            transposed_shapes=(squares[0], *layer_shapes(LLAMA3_8B, 2048)[::2], layer_shapes(LLAMA3_70B, 2048)[2]),
            float32_shapes=(*squares[:4], layer_shapes(LLAMA3_8B, 2048)[2]),
        ),
        attention=AttentionSizes(
            (("llama3_8b", (32, 8, 128)), ("llama3_70b", (64, 8, 128))), sequences=(2048, 4096, 1024, 8192, 512)
        ),
        memory=MemorySizes(tuple(size * MIB for size in (256, 1, 16, 1024, 4, 64, 2048))),
        host_copies=HostCopySizes(
            tuple(size * MIB for size in (1, 4, 16, 64, 256, 1024, 2048)),
            overlap_bytes=512 * MIB,
            product_size=8192,  # of 128 MiB: a sum's operands are larger than the GPU's caches
            kernels=8,
        ),
        llama_block=BlockSizes(
            (
                block,
                dataclasses.replace(block, d_model=2048, n_heads=16, d_ff=8192),
                dataclasses.replace(block, d_model=8192, n_heads=64, d_ff=28_672),
            ),
            sequence=2048,
        ),
        steps=StepSizes(
            ("llama_1b_cudnn", "llama_1b", "mixtral_small", "vit_b16", "resnet50", "gpt2_small", "gpt2_medium")
        ),
        pair=PairSizes(
            dataclasses.replace(LLAMA3_8B, vocab_size=32_000, d_model=1024, n_layers=4, n_heads=8, d_ff=3584),
            batch=8,
            sequence=1024,
        ),
        offload=OffloadSizes(
            dataclasses.replace(LLAMA3_8B, vocab_size=32_000, attention="cudnn"),
            layers=(13, 64),  # 3.1 to 7.9 billion parameters on GPUs of 40 to 94 GB, up to 14.2 on larger ones
            sequence=2048,
            examples=2,
            copy_bytes=1024 * MIB,
        ),
        budgets=Budgets(
            (
                ("simulated_vs_measured", 140.0),
                ("two_processes", 75.0),
                ("matmul", 60.0),
                ("attention", 40.0),
                ("memory", 30.0),
                ("host_copies", 25.0),
                ("llama_block", 45.0),
            ),
        ),
    )


def offload() -> Sizes:
    """Of full size the section that trains with some of a model on the host, in less than eight minutes of its own."""
    return dataclasses.replace(full(), name="offload", budgets=Budgets((("offload", 465.0),)))


def tiny() -> Sizes:
    """The same on any machine, in seconds: what it measures means nothing."""
    squares = ((64, 64, 64), (128, 128, 128))
    return Sizes(
        "tiny",
        effort=Effort(sample_s=1e-4, samples=2, call_s=1e-5, most_repeats=2),
        matmul=MatmulSizes(squares, squares[:1], squares[:1], expected_flops_per_s=1e10),
        attention=AttentionSizes((("tiny", (4, 2, 8)),), sequences=(32,), expected_flops_per_s=1e10),
        memory=MemorySizes((1 << 16, 1 << 18), columns=128, tiny_kernels=8, expected_bytes_per_s=1e10),
        host_copies=HostCopySizes((1 << 16, 1 << 18), overlap_bytes=1 << 16, product_size=64, kernels=2),
        llama_block=BlockSizes((LLAMA_SMALLEST,), sequence=32, runs=1),
        steps=StepSizes(("llama_smallest",), samples=2, sample_s=1e-3, runs=1),
        pair=PairSizes(
            LLAMA_SMALLEST,
            batch=4,
            sequence=16,
            loss_steps=2,
            samples=1,
            steps=1,
        ),
        offload=OffloadSizes(
            dataclasses.replace(LLAMA_SMALLEST, remat_policy=LLAMA_TINY.remat_policy),
            layers=(2, 3),
            sequence=16,
            examples=4,
            copy_bytes=1 << 16,
            steps=2,
        ),
        budgets=Budgets(
            (
                ("simulated_vs_measured", 60.0),
                ("two_processes", 100.0),
                ("matmul", 30.0),
                ("attention", 30.0),
                ("memory", 30.0),
                ("host_copies", 30.0),
                ("llama_block", 30.0),
            ),
            grace_s=2.0,
        ),
    )


SIZES: Mapping[str, Callable[[], Sizes]] = {"full": full, "offload": offload, "tiny": tiny}
