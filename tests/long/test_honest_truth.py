"""Plain Python accepts every honest program of the corpus, and no wrong variant of one."""

from __future__ import annotations

import pytest

from tests.honest_programs import PAIRS, Pair, plain_python_accepts, plain_python_prints


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_plain_python_accepts_the_program_and_no_variant(pair: Pair) -> None:
    accepts = plain_python_prints if pair.mode == "stdio" else plain_python_accepts
    assert accepts(pair.program, pair.tests)
    assert not (pair.wrong and accepts(pair.wrong, pair.tests))
