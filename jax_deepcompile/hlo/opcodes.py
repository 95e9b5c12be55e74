"""The operations of XLA by what they do, from ``xla/hlo/ir/hlo_opcode.h`` (as of JAX 0.12)."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


FREE = _words("""
    add-dependency after-all bitcast constant domain get-dimension-size get-tuple-element opt-barrier
    optimization-barrier parameter set-dimension-size tuple
""")
"""They run nothing: they name values."""

FREE_CALLS = _words("AllocateBuffer")
"""Targets of custom calls that run nothing either."""

COLLECTIVES = _words("""
    all-gather all-reduce all-to-all collective-broadcast collective-permute ragged-all-to-all reduce-scatter
""")

CONTROL = _words("call conditional while")
"""They run other computations."""

ELEMENTWISE = _words("""
    abs add and atan2 bitcast-convert ceil clamp clz compare complex convert count-leading-zeros divide floor imag
    is-finite maximum minimum multiply negate not or popcnt real reduce-precision remainder round-nearest-afz
    round-nearest-even select shift-left shift-right-arithmetic shift-right-logical sign stochastic-convert subtract xor
""")

TRANSCENDENTAL = _words("""
    acos acosh asin asinh atan atanh cbrt cos cosh cosine erf exponential exponential-minus-one log log-plus-one
    logistic power rsqrt sin sine sinh sqrt tan tanh
""")

ARRAYS = _words("""
    async batch-norm-grad batch-norm-inference batch-norm-training broadcast cholesky concatenate convolution copy
    custom-call dot dynamic-reshape dynamic-slice dynamic-update-slice fft fusion gather infeed iota map outfeed pad
    partition-id ragged-dot recv reduce reduce-window replica-id reshape reverse rng rng-bit-generator
    rng-get-and-update-state scaled-dot scatter select-and-scatter send slice sort topk transpose triangular-solve
""")
"""They compute on or move whole arrays."""

KNOWN = FREE | COLLECTIVES | CONTROL | ELEMENTWISE | TRANSCENDENTAL | ARRAYS

ASYNC_SUFFIXES = ("-start", "-update", "-done")


def split(opcode: str) -> tuple[str, str]:
    """The operation, and which part of it runs: ``-start``, ``-update``, ``-done`` or, for all of it, nothing.

    >>> split("all-gather-start"), split("fusion")
    (('all-gather', '-start'), ('fusion', ''))
    """
    for suffix in ASYNC_SUFFIXES:
        if opcode.endswith(suffix):
            return opcode.removesuffix(suffix), suffix
    return opcode, ""
