"""Whether steps give the policy nothing to learn from: no completion does better than its group's others.

A run goes on without a failure then, and its policy stays as it is.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from retrain.control.rules import StateDict
from retrain.records.step_row import RolloutSummary

NOTABLE = 10  # steps in a row
CUT_OFF = 0.9  # share of completions
SAME = 0.01  # nats per token


@dataclass
class SignalWatch:
    """Follows, from step to step, how long there has been no signal; sums are over these steps."""

    steps: int = 0
    rewards: float = 0.0
    correct: float = 0.0
    truncated: float = 0.0
    unjudged: int = 0  # of these steps, those of which no completion could be judged

    def observe(self, step: int, rollouts: RolloutSummary, *, trained: bool, entropy: float | None) -> str:
        """Take a step; return how long there has been no signal and a likely reason, "" if not for long.

        A policy that has learned its task has nothing left to learn, which is not told.

        Args:
            trained: whether any completion entered the loss.
            entropy: nats per token, None if not known.
        """
        if trained and rollouts.zero_signal_group_fraction < 1:
            vars(self).update(asdict(SignalWatch()))
            return ""
        self.steps += 1
        if rollouts.mean_reward is None:
            self.unjudged += 1
        self.rewards += rollouts.mean_reward or 0.0
        self.correct += rollouts.correct_rate or 0.0
        self.truncated += rollouts.max_token_hit_rate
        first, judged = step - self.steps + 1, self.steps - self.unjudged
        if self.steps < NOTABLE or (first > 1 and judged and self.correct == judged):
            return ""
        what = f"no learning signal in steps {first} to {step}"
        if not judged:
            return f"{what}: the reward can judge no completion; correct it, or use prompts that it can judge"
        why = self._why(entropy, from_start=first == 1)
        return f"{what}, with a mean reward of {self.rewards / judged:.3g}: {why}"

    def _why(self, entropy: float | None, *, from_start: bool) -> str:
        if self.correct == self.steps - self.unjudged:
            return "every completion has a reward of 1; use harder prompts, or check the reward"
        are_same, share = entropy is not None and entropy < SAME, self.truncated / self.steps
        if share >= CUT_OFF and (from_start or not are_same):
            other = "ask for shorter answers" if from_start else "lower [training].lr"
            what = "raise [training].max_tokens (or what limits an episode)"
            return f"{share:.0%} of completions were cut off; {what}, or {other}"
        if are_same:
            hint = "raise temperature or entropy_bonus"
            hint = hint if from_start else f"lower [training].lr, or {hint}"
            return f"completions hardly differ (entropy {entropy:.2g} nats per token); {hint}"
        if self.correct:
            return "prompts are always solved or never; raise [training].group_size, or use other prompts"
        other = "partial credit or [warmup]" if from_start else "a lower [training].lr"
        return f"no completion has a reward of 1; read `retrain samples`, and try easier prompts, {other}"

    def state_dict(self) -> StateDict:
        return asdict(self)

    def load_state_dict(self, state: StateDict) -> None:
        vars(self).update(state)
