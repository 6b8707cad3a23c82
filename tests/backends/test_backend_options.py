"""What `[backend.options]` of the three backends have in common."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from retrain.backends import local, numpy, tinker

BACKENDS = [
    (numpy, numpy.NumpyOptions()),
    (tinker, tinker.TinkerOptions()),
    (local, local.LocalOptions()),
]


@pytest.mark.parametrize(("backend", "defaults"), BACKENDS)
def test_most_defaults_keep_their_options_rule(backend, defaults):
    problems = backend.check_options(asdict(defaults))
    assert not [problem for problem in problems if "unknown key" in problem]
    assert {problem.partition(":")[0] for problem in problems} <= {"engine_url", "teacher_url"}  # "" for none


@pytest.mark.parametrize(("backend", "defaults"), BACKENDS)
def test_an_unknown_option_is_compared_with_the_known_ones(backend, defaults):
    known = list(asdict(defaults))
    assert backend.check_options({known[0] + "x": 1}) == [
        f"{known[0]}x: unknown key; did you mean {known[0]!r}?"
    ]
    if "devices" not in known:
        (problem,) = backend.check_options({"devices": 2})
        assert problem.endswith('remove it, or use backend = "local"')
    assert backend.check_options({"zzzzz": 1}) == [f"zzzzz: unknown key; known: {', '.join(known)}"]
