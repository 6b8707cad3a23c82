"""What the tests of extras share."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Ignore sockets that the Tinker SDK leaves to be collected: a later test would be blamed for them."""
    config.addinivalue_line("filterwarnings", "ignore:unclosed (transport )?<.*ocket:ResourceWarning")
