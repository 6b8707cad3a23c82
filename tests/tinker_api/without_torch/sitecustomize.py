"""Hides PyTorch from an interpreter that finds this file on its path."""

import sys

sys.modules["torch"] = None  # type: ignore[assignment]
