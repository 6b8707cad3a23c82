"""All weights of a small network in one vector, with a named view for each matrix.

The optimizer and the gradient norm use the vector; the network uses the views.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]  # float32 or float64, as [backend.options].dtype says
Ints: TypeAlias = NDArray[np.int64]
Shapes: TypeAlias = Mapping[str, tuple[int, ...]]


class Weights:
    """A flat vector and its named views, for weights and for gradients."""

    def __init__(self, shapes: Shapes, dtype: str) -> None:
        self.shapes = dict(shapes)
        self.flat: Array = np.zeros(sum(prod(shape) for shape in shapes.values()), dtype)
        self._views: dict[str, Array] = {}
        start = 0
        for name, shape in shapes.items():
            self._views[name] = self.flat[start : start + prod(shape)].reshape(shape)
            start += prod(shape)

    def __getitem__(self, name: str) -> Array:
        return self._views[name]

    def zeros_like(self) -> Weights:
        """Return weights of the same shapes, all zero."""
        return Weights(self.shapes, self.flat.dtype.name)

    def copy(self) -> Weights:
        """Return a copy."""
        same = self.zeros_like()
        same.flat[:] = self.flat
        return same

    def non_finite(self) -> list[str]:
        """Return the names of views that contain a NaN or an infinity."""
        return [name for name, view in self._views.items() if not np.isfinite(view).all()]
