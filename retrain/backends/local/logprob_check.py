"""Checks on a few tokens that log-probabilities are the same in sampling and in training.

Sampling uses a cache that is copied, cut and joined, or a server; training runs whole sequences and computes
logits in chunks. A model that is sensitive to the difference would silently be trained on wrong numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate, chain

import numpy as np
import torch

from retrain.backends.engines import Drawn, Ids
from retrain.backends.local.kv_cache import Windows, windows_of
from retrain.backends.local.loading import Cut, Policy, fitting, is_out_of_memory
from retrain.backends.local.micro_batches import Layout, states_of
from retrain.backends.local.sampling import RowCache, cache_for
from retrain.backends.rows import Row
from retrain.base.errors import ConfigError, RunFailedError, first_line

LOGITS_TOLERANCE = 1e-3  # relative to the largest; both computations run the same kernels
# of the logits' standard deviation; a cache changes the order of summation, and bfloat16 has eight bits
CACHE_TOLERANCE = {torch.float32: 0.01, torch.bfloat16: 0.1}
# that a model's code raises if it is not called as it expects
FAULTS = (AttributeError, LookupError, TypeError, ValueError, RuntimeError)

SHORT, LONG = (1, 2, 3), (3, 1, 2, 4, 5, 0)

CHECKED_TOKENS = 256  # of a server
TOLERANCE_NATS = 0.2  # mean over tokens; differences from kernels and bfloat16 are ten times smaller
NOISE_NATS = 0.02  # smaller differences are noise
MOST_KEPT = 0.95  # fraction of the server's tokens that our own cut keeps as well, at least


def try_out(model: str, policy: Policy) -> Windows | None:
    """Return the layers' attention windows if rows can be added while others run, else None.

    Rejects a policy whose log-probabilities this backend would compute incorrectly.
    """
    with fitting(model), _explained(model), torch.no_grad():
        # the model's own logits may be scaled or capped
        ids = torch.zeros((1, 2), dtype=torch.long, device=policy.device)
        whole = policy.causal(input_ids=ids, use_cache=False).logits.float()
        ours = policy.logits(policy.body(input_ids=ids, use_cache=False).last_hidden_state)
        if not torch.isfinite(whole).all():
            raise ConfigError(
                f"[model].model: {model!r} gives log-probabilities that are not finite: its weights are "
                'damaged, or too large for their type; try [backend.options].dtype = "float32"'
            )
        most = LOGITS_TOLERANCE * float(whole.abs().max())
        if ours.shape != whole.shape or not torch.allclose(ours, whole, rtol=LOGITS_TOLERANCE, atol=most):
            raise ConfigError(
                f"[model].model: {model!r} transforms its logits in a way that this backend does not "
                "support, so its log-probabilities would be wrong; use another model"
            )
        if policy.context < len(LONG) + 3:
            return None
        windows = windows_of(policy)
        for choice in () if windows is None else (windows, replace(windows, is_whole=True)):
            if _agrees(policy, partial(_apart, policy, choice)):
                return choice
        apart = _apart(policy, None)
        if not apart <= CACHE_TOLERANCE[policy.causal.dtype]:
            raise ConfigError(
                f"[model].model: {model!r} has other logits with a cache and padding than without "
                f"({apart:.0%} of their spread apart), so its samples could not be trained on; "
                "use another model"
            )
        return None


def _agrees(policy: Policy, apart: Callable[[], float]) -> bool:
    """Whether a way to run a model gives its logits; not if its attention is not called as documented."""
    try:
        with torch.no_grad():
            return apart() <= CACHE_TOLERANCE[policy.causal.dtype]
    except FAULTS as error:
        _raise_if_machine(error)
        return False


def most_shared(policy: Policy, windows: Windows | None) -> int:
    """Return the longest sequence that can be trained on with its prompt shared by others; 0: none."""
    kind = policy.causal.config.get_text_config()._attn_implementation
    if windows is None or windows.is_whole or kind != "sdpa" or min(windows.of_layers) < len(LONG):
        return 0
    return min(windows.of_layers) if _agrees(policy, partial(_apart_if_shared, policy)) else 0


def _apart_if_shared(policy: Policy) -> float:
    """Compare logits of completions that share their prompt with those of whole sequences."""
    prompts, owners, completions = (LONG[:-2], SHORT), (0, 1, 0), ((2, 5), (4, 0), (1, 3))
    layout = Layout.of([*map(len, prompts)], owners, 2, policy)
    row = torch.tensor([[*prompts[0], *prompts[1], 0, *chain(*completions)]], device=policy.device)
    shared = states_of(policy, row, layout)[0, layout.cut :].unflatten(0, (len(owners), -1))[:, -1]
    whole = [
        policy.body(
            input_ids=torch.tensor([[*prompts[owner], *ids]], device=policy.device), use_cache=False
        ).last_hidden_state[:, -1]
        for owner, ids in zip(owners, completions, strict=True)
    ]
    trained = policy.logits(torch.cat(whole))
    return float((policy.logits(shared) - trained).abs().mean() / trained.std())


def _apart(policy: Policy, windows: Windows | None) -> float:
    """Compare logits in sampling (shared prompts, rows that end early or begin late) with those in training.

    Returns the mean difference in units of the logits' standard deviation.
    """
    cache = cache_for(policy, windows, policy.device)
    cache.admit([Row(ids, limit=3) for ids in (LONG, SHORT, LONG, LONG)], None)
    _advance(cache)
    cache.keep([1, 3])
    if windows is not None:
        cache.admit([Row(SHORT, limit=2)], None)
    _advance(cache)
    sampled = policy.logits(cache.hidden)
    whole = [torch.tensor([row.ids], device=policy.device) for row in cache.rows]
    trained = torch.cat(
        [policy.logits(policy.body(input_ids=ids, use_cache=False).last_hidden_state[:, -1]) for ids in whole]
    )
    return float((sampled - trained).abs().mean() / trained.std())


def _advance(cache: RowCache) -> None:
    for number, row in enumerate(cache.rows):
        row.tokens.append(len(LONG) - 1 - number)
    cache.advance(torch.tensor([row.tokens[-1] for row in cache.rows], device=cache.hidden.device))


def _raise_if_machine(error: Exception) -> None:
    if is_out_of_memory(error) or "CUDA" in str(error):
        raise error


@contextmanager
def _explained(model: str) -> Iterator[None]:
    try:
        yield
    except FAULTS as error:
        _raise_if_machine(error)
        why = first_line(error)
        raise ConfigError(
            f"[model].model: {model!r} cannot be run by this backend ({type(error).__name__}: {why}); "
            'adapters on some layers only may help, such as [backend.options].target_modules = ["q_proj", '
            '"v_proj"], or use another model'
        ) from error


def reject_unknown(drawn: Sequence[Drawn], known: int) -> None:
    """Raise RunFailedError for tokens without an embedding: on a GPU they would crash the process."""
    if unknown := [token for completion in drawn for token in completion.tokens if not 0 <= token < known]:
        raise RunFailedError(
            f"the sampling server drew token {unknown[0]}, and this model knows {known}; "
            "check that it serves the same model"
        )


def reject_other_policy(
    policy: Policy, prompts: Sequence[Ids], drawn: Sequence[Drawn], temperature: float, cut: Cut | None
) -> None:
    """Raise RunFailedError if the log-probabilities of a server's completions are not this policy's."""
    completions = [completion.tokens for completion in drawn]
    left = [max(0, CHECKED_TOKENS - used) for used in accumulate(map(len, completions), initial=0)]
    first = [(ids, own[:most]) for ids, own, most in zip(prompts, completions, left, strict=False) if most]
    theirs = np.concatenate([completion.logprobs for completion in drawn])[:CHECKED_TOKENS]

    def nats_apart(at: float, cut: Cut | None) -> float:
        with torch.no_grad():
            logprobs = [_logprobs(policy, ids, tokens, at, cut) for ids, tokens in first]
        ours = torch.cat(logprobs).double().cpu().numpy()
        kept = np.isfinite(ours)  # rounding may cut off a token that the server has just not
        return float(np.abs(ours - theirs)[kept].mean()) if kept.mean() > MOST_KEPT else math.inf

    apart = nats_apart(temperature, cut)
    if NOISE_NATS < apart < math.inf and nats_apart(1.0, None) < apart / 2:
        raise RunFailedError(
            "the sampling server reports log-probabilities before temperature, top_p, top_k and min_p are "
            "applied; start it with processed ones (vLLM: --logprobs-mode processed_logprobs)"
        )
    if apart > TOLERANCE_NATS:
        raise RunFailedError(
            f"the sampling server's log-probabilities are {apart:.2f} nats per token from "
            "this model's; check that it serves the same weights and applies the adapters"
        )


def _logprobs(policy: Policy, prompt: Ids, tokens: Ids, temperature: float, cut: Cut | None) -> torch.Tensor:
    row = torch.tensor([[*prompt, *tokens[:-1]]], device=policy.device)
    hidden = policy.body(input_ids=row, use_cache=False).last_hidden_state[0, len(prompt) - 1 :]
    targets, size = torch.tensor(tokens, device=policy.device)[:, None], policy.rows_at_a_time
    parts = zip(hidden.split(size), targets.split(size), strict=True)
    return torch.cat(
        [policy.log_distribution(states, temperature, cut).gather(1, own)[:, 0] for states, own in parts]
    )
