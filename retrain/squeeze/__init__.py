"""Analyse the effective rank of a LoRA adapter, and truncate it to a smaller rank.

The update of a layer is scale * B A. With B = Qb Rb and A^T = Qa Ra its singular values are those of the
r x r core scale * Rb Ra^T, so the full matrix is never formed. Truncation gives the best approximation
of that rank (Eckart and Young, 1936, doi:10.1007/BF02288367).

Needs torch and safetensors (extra `local`); peft is not imported.
"""

from __future__ import annotations

from retrain.squeeze.adapter import Adapter, Layer, read_adapter, write_adapter
from retrain.squeeze.spectrum import Retained, Spectrum, analyse, output_error, squeezed

__all__ = [
    "Adapter",
    "Layer",
    "Retained",
    "Spectrum",
    "analyse",
    "output_error",
    "read_adapter",
    "squeezed",
    "write_adapter",
]
