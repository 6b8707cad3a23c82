"""A teacher of the embedded backend: the policy of a finished run, of any size, or the run's own start."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

import numpy as np

from retrain.backends import Teacher, TeacherSpec
from retrain.backends.numpy.gru import Array, Batch, Weights
from retrain.backends.numpy.sampling import Characters
from retrain.backends.saved import reading
from retrain.base.errors import ConfigError, NonFiniteError, RecordsError
from retrain.base.rollouts import Rollout, TeacherScores
from retrain.config.files import NUMPY, weights_of

FORMAT = 2  # of a checkpoint's two files; increment when old ones can no longer be read
FACTS = "policy.json"


def arrays_of(directory: Path) -> dict[str, Array]:
    """Return the arrays of a checkpoint."""
    # opened here, because np.load does not close a file that is not a zip
    with (directory / NUMPY).open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


def weights_of_run(teacher: str, characters: Characters) -> Weights:
    """Return the weights of a finished run; a ConfigError if there are none, or its tokens are others."""
    file = weights_of(teacher)
    if file is None or file.name != NUMPY:
        raise ConfigError(f"[teacher].teacher: {teacher!r} is no run of the numpy backend; name one that is")
    try:
        with reading(file.parent / FACTS, "numpy", {"format": FORMAT}, zipfile.BadZipFile) as facts:
            weights = Weights({name: tuple(shape) for name, shape in facts["shapes"].items()}, facts["dtype"])
            weights.flat[:] = arrays_of(file.parent)["weights"]
            alphabet = str(facts["alphabet"])
    except RecordsError as error:
        raise ConfigError(f"[teacher].teacher: {error}") from error
    tokens = enumerate(zip_longest(alphabet, characters.alphabet))
    for number, (its, own) in tokens:
        if its != own:
            its, own = (repr(token) if token else "the end" for token in (its, own))
            raise ConfigError(
                f"[teacher].teacher: token {number} of {teacher} is {its}, and {own} in this run; name a run "
                "of a task with the same alphabet"
            )
    return weights


class NumpyTeacher(Teacher):
    """Weights that score tokens; with `policy`, those that `refresh` copies."""

    def __init__(
        self, spec: TeacherSpec, weights: Weights, characters: Characters, policy: Weights | None = None
    ) -> None:
        self._spec, self._weights, self._characters, self._policy = spec, weights, characters, policy

    def score(self, rollouts: Sequence[Rollout]) -> list[TeacherScores]:
        prompts = [self._characters.of(rollout.prompt) for rollout in rollouts]
        batch = Batch.of(prompts, rollouts, self._characters.end)
        with np.errstate(all="ignore"):
            logp = batch.run(self._weights, self._spec.temperature)[2][batch.rows].astype(np.float64)
        if not np.isfinite(logp).all():
            raise NonFiniteError(f"[teacher].teacher: {self._spec.name} gives no finite log-probabilities")
        chosen, likeliest = logp[np.arange(len(logp)), batch.targets], logp.argmax(axis=1)
        scores, start = [], 0
        for prompt, rollout in zip(prompts, rollouts, strict=True):
            own = slice(start, start + len(rollout.tokens))
            start = own.stop
            whole, read = logp[own] if self._spec.is_whole else None, len(prompt) + rollout.length
            scores.append(TeacherScores(chosen[own], read, likeliest[own], whole))
        return scores

    def refresh(self) -> None:
        if self._policy is None:
            super().refresh()
        else:
            self._weights.flat[:] = self._policy.flat
