"""Scorers that use a process pool."""

from __future__ import annotations

from collections.abc import Sequence

from retrain.errors import RunFailedError
from retrain.rewards import Answer, BatchScorer, Outcome, Score, UnscoredError
from retrain.rewards.pool import ProcessPool, Reply, ReplyKind
from retrain.rollouts import Prompt

_OUTCOMES = {ReplyKind.SCORED: Outcome.SCORED, ReplyKind.TIMEOUT: Outcome.TIMEOUT}


class VerifierScorer:
    """Scores with a built-in verifier: a completion that makes it fail or time out gets 0."""

    def __init__(self, pool: ProcessPool) -> None:
        self._pool = pool

    def score_all(self, answers: Sequence[Answer]) -> list[Score]:
        return [_score_of(reply) for reply in self._pool.run(answers)]

    def close(self) -> None:
        self._pool.close()


class FunctionScorer(VerifierScorer):
    """Scores with a user's function: an exception is a bug, and a completion whose call hangs is unscored."""

    def score_all(self, answers: Sequence[Answer]) -> list[Score]:
        """Score every completion, in order.

        Raises:
            RunFailedError: the function raised; names the prompt.
        """
        replies = self._pool.run(answers)
        for answer, reply in zip(answers, replies, strict=True):
            if reply.kind is ReplyKind.RAISED:
                raise RunFailedError(f"{reply.message}, for prompt {answer.prompt.id}")
        return [
            _score_of(reply)
            if reply.kind is ReplyKind.SCORED
            else Score(None, _OUTCOMES.get(reply.kind, Outcome.ERROR), reply.message)
            for reply in replies
        ]


def score_one(scorer: BatchScorer, completion: str, prompt: Prompt) -> float:
    """Score a single completion and close the scorer.

    Raises:
        TimeoutError: scoring took too long.
        UnscoredError: the reward is unknown.
    """
    try:
        scores = scorer.score_all([Answer(completion, prompt)])
        assert isinstance(scores, list)
    finally:
        scorer.close()
    return value_of(scores[0])


def value_of(score: Score) -> float:
    """Return a score's value, or raise TimeoutError or UnscoredError according to its outcome."""
    if score.outcome is Outcome.TIMEOUT:
        raise TimeoutError(score.message)
    if score.value is None or score.outcome is Outcome.ERROR:
        raise UnscoredError(score.message)
    return score.value


def _score_of(reply: Reply) -> Score:
    if reply.kind is ReplyKind.SCORED:
        return Score(reply.value)
    value = None if reply.kind is ReplyKind.UNSCORED else 0.0
    return Score(value, _OUTCOMES.get(reply.kind, Outcome.ERROR), reply.message)
