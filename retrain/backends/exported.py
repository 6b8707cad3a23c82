"""A policy as others load it: what a backend's `export` has written, and of which model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Exported:
    """Adapters in peft's format, or a whole model in transformers'; names are hub ids or directories."""

    base: str  # the model without adapters
    tokenizer: str
    revision: str = ""  # of the base model at its hub; "" for the default branch
    dtype: str = ""  # of the base model's weights in the run, such as "float32"; "" if not known
    is_whole: bool = False  # every parameter was trained: there are no adapters
    unmergeable: str = ""  # why adapters and base model cannot become one model; "" if they can
