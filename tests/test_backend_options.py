"""What `[backend.options]` of the three backends have in common."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from retrain.backends import numpy as _numpy_options
from retrain.backends.local import options as local_options
from retrain.backends.tinker import options as _tinker_options

BACKENDS = [
    (_numpy_options, _numpy_options.NumpyOptions()),
    (_tinker_options, _tinker_options.TinkerOptions()),
    (local_options, local_options.LocalOptions()),
]


@pytest.mark.parametrize(("backend", "defaults"), BACKENDS)
def test_every_option_has_a_rule_and_most_defaults_keep_it(backend, defaults):
    problems = backend.check_options(asdict(defaults))
    assert not [problem for problem in problems if "unknown key" in problem]
    assert {problem.partition(":")[0] for problem in problems} <= {"engine_url"}  # "" for no server


@pytest.mark.parametrize(("backend", "defaults"), BACKENDS)
def test_every_rule_is_of_an_option(backend, defaults):
    assert set(backend._RULES) == set(asdict(defaults))


@pytest.mark.parametrize(("backend", "_"), BACKENDS)
def test_an_unknown_option_is_compared_with_the_known_ones(backend, _):
    known = list(backend._RULES)
    assert backend.check_options({known[0] + "x": 1}) == [
        f"{known[0]}x: unknown key; did you mean {known[0]!r}?"
    ]
    assert backend.check_options({"zzzzz": 1}) == [f"zzzzz: unknown key; known: {', '.join(known)}"]
