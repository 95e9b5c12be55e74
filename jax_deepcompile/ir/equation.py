"""What the package reads of an equation. JAX's own annotations stop at ``AbstractValue``, which has no shape."""

from __future__ import annotations

from typing import Any, Protocol


class Equation(Protocol):
    """A ``jax.extend.core.JaxprEqn`` whose operands and results are arrays.

    Attributes:
      primitive: what it computes.
      params: the primitive's parameters.
      invars: operands, variables or literals; each has ``aval.shape`` and ``aval.dtype``.
      outvars: results.
    """

    @property
    def primitive(self) -> Any: ...

    @property
    def params(self) -> dict[str, Any]: ...

    @property
    def invars(self) -> list[Any]: ...

    @property
    def outvars(self) -> list[Any]: ...

    @property
    def effects(self) -> Any: ...

    @property
    def source_info(self) -> Any: ...
