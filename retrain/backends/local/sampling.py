"""Sampling of completions: rows are added as others end, as many as fit in memory.

Each distinct prompt is run once, and its cache is copied to the rows of its group. A token's log-probability
comes from the same forward pass that it was sampled from. Each row draws from random numbers of its own, so
which rows share a batch changes the arithmetic's rounding only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import TypeAlias

import numpy as np
import torch

from retrain.backends import Sampling
from retrain.backends.engines import Drawn, Ids
from retrain.backends.local.kv_cache import Cohorts, Pass, Windows, cells_of
from retrain.backends.local.loading import Cut, DeviceMemory, Policy, finished_s, is_out_of_memory
from retrain.backends.local.ranks import Ranks, shares
from retrain.backends.metering import ModelCosts, SamplingWork, WorkMeter
from retrain.backends.progress import SamplingProgress
from retrain.backends.rows import CallsProgress, GivenRows, Row, RowAdmission, RowSource, uniforms
from retrain.backends.text import Text
from retrain.base.errors import BackendMemoryError

GUESSED_SHARE = 8  # rows are admitted as if each took this part of its limit, until they outgrow the cache
GPU_STEPS_PER_SYNC = 8  # where looking at what was drawn lets the queue of kernels run empty


# the rows of the batch, their key-value cache, and the state that predicts each row's next token
RowCache: TypeAlias = Cohorts | Pass


def cache_for(policy: Policy, windows: Windows | None, device: torch.device) -> RowCache:
    """Return an empty cache: one that rows join at any time if `windows_of` the policy is known."""
    return Pass(policy, device) if windows is None else Cohorts(policy, windows, device)


def budget_of(sampling: Sampling) -> str:
    """Return the name of the budget that a call uses, and lowers if it does not suffice."""
    return "evaluate" if sampling.evaluates else "sample"


@dataclass(frozen=True, slots=True)
class SampledShare:
    """What a rank sampled."""

    rows: Sequence[Row]
    budget: int  # size of the cache that fitted
    work: SamplingWork


@dataclass(slots=True, eq=False)
class TorchSampler:
    """Samples with PyTorch, and remembers the size of the key-value cache that fits."""

    policy: Policy
    text: Text
    memory: DeviceMemory
    costs: ModelCosts
    # size of the cache in tokens, halved when it does not fit; it affects rounding, so evaluation has its own
    budgets: dict[str, int]
    windows: Windows | None = None  # None: no row can join others
    cut: Cut | None = None
    ranks: Ranks = field(default_factory=Ranks)
    observe: Callable[[SamplingProgress], None] = lambda _: None
    observe_every_s: float = 0.5
    steps_per_sync: int = 1  # tokens drawn of each row before the host looks at them
    work: WorkMeter = field(default_factory=WorkMeter)

    def __post_init__(self) -> None:
        if self.policy.device.type != "cpu":
            self.steps_per_sync = GPU_STEPS_PER_SYNC

    def complete(
        self, prompts: Sequence[Ids], limits: Sequence[int], sampling: Sampling, generator: torch.Generator
    ) -> list[Drawn]:
        """Return each prompt's group, prompt after prompt, of at most its limit of tokens.

        Temperature 0 takes the most likely token, with its log-probability at temperature 1.
        """
        device = generator.device
        count = len(prompts) * sampling.group_size
        streams = torch.randint(2**63 - 1, (count,), generator=generator, device=device).tolist()
        limited = zip(prompts, limits, strict=True)
        owners = (pair for pair in limited for _ in range(sampling.group_size))
        rows = [
            Row(ids, min(limit, self.policy.context - len(ids)), stream)
            for (ids, limit), stream in zip(owners, streams, strict=True)
        ]
        size = sampling.group_size
        groups = [rows[start : start + size] for start in range(0, len(rows), size)]
        self.share_out(groups, sampling.temperature, budget_of(sampling))
        return [row.drawn() for row in rows]

    def share_out(self, groups: Sequence[Sequence[Row]], temperature: float, budget: str) -> None:
        """Sample rows to their ends: each rank those of whole groups, of about as many expected tokens."""
        expected = [len(group[0].prompt) + sum(row.limit for row in group) for group in groups]
        own, *others = (
            [*chain.from_iterable(groups[number] for number in numbers)]
            for numbers in shares(expected, [0.0] * self.ranks.size)
        )
        commands = [("sample", share, temperature, budget, self.budgets[budget]) for share in others]
        own_part = partial(self.fill, own, temperature, self.policy.device, budget)
        _, parts = self.ranks.together(commands, own_part)
        for share, part in zip(others, parts, strict=True):
            for row, sampled in zip(share, part.rows, strict=True):
                row.tokens, row.logprobs, row.entropies = sampled.tokens, sampled.logprobs, sampled.entropies
                row.has_ended = sampled.has_ended
            self.work.add(part.work.prefill, part.work.decode)
            self.budgets[budget] = min(self.budgets[budget], part.budget)

    def sample_share(self, rows: Sequence[Row], temperature: float, budget: str, cells: int) -> SampledShare:
        """Sample the rows that rank 0 sent, in a cache of so many tokens."""
        self.memory.begin_peak()
        self.budgets[budget] = cells
        self.fill(rows, temperature, self.policy.device, budget)
        return SampledShare(rows, self.budgets[budget], self.work.take())

    def fill(self, rows: Sequence[Row], temperature: float, device: torch.device, budget: str) -> None:
        """Sample these rows to their ends."""
        with CallsProgress(self.observe, self.observe_every_s).call() as tell, self.policy.together():
            self.follow(GivenRows(rows), temperature, device, budget, partial(tell, rows))

    def follow(
        self,
        source: RowSource,
        temperature: float,
        device: torch.device,
        budget: str,
        tell: Callable[[], None] = lambda: None,
    ) -> None:
        """Sample the rows of a source, with less memory at a time if it does not suffice."""
        waiting: deque[Row] = deque()
        while waiting or (waiting := deque(source.take(0))):
            cache, cells = cache_for(self.policy, self.windows, device), self.budgets[budget]
            if per_token := self.costs.kv_bytes_per_token:
                cells = min(cells, int(self.memory.cache_bytes() / per_token))
            batch = _Batch(self, cache, source, waiting, cells, temperature, device)
            try:
                # inference tensors that a model caches could not be used in training
                with torch.no_grad():
                    batch.drain(tell)
                return
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                reason = str(error)
            demand, alone = batch.demand, len(batch.running) == 1
            waiting = deque(row for row in (*batch.running, *waiting) if not row.is_done)
            del batch, cache
            self.memory.free()
            if alone:
                raise BackendMemoryError(f"one completion did not fit in memory ({reason}); lower max_tokens")
            self.budgets[budget] = max(1, demand // 2)


@dataclass(eq=False)
class _Batch:
    """One attempt to sample rows within a size of the cache."""

    sampler: TorchSampler
    cache: RowCache
    source: RowSource
    waiting: deque[Row]
    cells: int
    temperature: float
    device: torch.device
    running: list[Row] = field(default_factory=list)
    lengths: list[tuple[int, int]] = field(default_factory=list)  # of the rows that ended: prompt, completion
    admission: RowAdmission = field(default_factory=RowAdmission)
    guess: int = 0  # tokens of a row, at least
    is_open: bool = True  # rows are admitted; not after some outgrew the cache, until another ends

    def __post_init__(self) -> None:
        self._expect(self.waiting)
        self._ends = frozenset(self.sampler.text.end_ids)

    @property
    def demand(self) -> int:
        """Tokens that the running rows are expected to take up."""
        return sum(map(self._demand, self.running))

    def _demand(self, row: Row) -> int:
        length = len(row.prompt) + min(row.limit, max(len(row.tokens) + 1, self.guess))
        return cells_of(self.sampler.windows, length)

    def drain(self, tell: Callable[[], None]) -> None:
        """Sample until no row waits or runs, and none comes."""
        runs, steps, prefill_s, decode_s = [], 0, 0.0, 0.0
        while self._take():
            began_s = finished_s(self.device)
            ran = self._refill()
            filled_s = finished_s(self.device) if ran else began_s
            steps += self._sync()
            decode_s += finished_s(self.device) - filled_s
            prefill_s += filled_s - began_s
            runs.append(ran)
            tell()
        costs = self.sampler.costs
        before, drawn = np.array(self.lengths).T
        self.sampler.work.add(
            costs.prefill(list(chain.from_iterable(runs)), sum(map(bool, runs)), prefill_s),
            costs.decode(before, drawn, decode_s, steps),
        )

    def _take(self) -> bool:
        """Queue the rows that have come; False if none is left."""
        self._expect(come := self.source.take(len(self.running) + len(self.waiting)))
        self.waiting.extend(come)
        return bool(self.running or self.waiting)

    def _expect(self, rows: Collection[Row]) -> None:
        longest = max((row.limit for row in rows), default=0)
        self.guess = max(
            self.guess, longest if self.sampler.windows is None else -(-longest // GUESSED_SHARE)
        )

    def _refill(self) -> list[int]:
        """Admit the rows that fit; return the lengths of the sequences that were run."""
        is_passing = self.sampler.windows is None and bool(self.running)
        if not self.waiting or not self.is_open or is_passing:
            return self.cache.admit([], None)
        fits = self._fitting()
        if not self.admission.is_due(len(fits), len(self.running), self.sampler.steps_per_sync):
            return self.cache.admit([], None)
        for _ in fits:
            self.waiting.popleft()
        self.running += fits
        return self.cache.admit(fits, self.waiting[0].ids if self.waiting else None)

    def _fitting(self) -> list[Row]:
        """Return the next rows for which there is room; at least one if none runs."""
        fits: list[Row] = []
        room = self.cells - self.demand
        for row in self.waiting:
            room -= self._demand(row)
            if room < 0 and (fits or self.running):
                break
            fits.append(row)
        return fits

    def _sync(self) -> int:
        """Draw a few tokens of every row, and drop the rows that end; return the number of steps."""
        steps = min(self.sampler.steps_per_sync, *(row.limit - len(row.tokens) for row in self.running))
        self._make_room(steps)
        policy, cache = self.sampler.policy, self.cache
        numbers = torch.from_numpy(uniforms(cache.rows, steps)).to(self.device)
        cut = self.sampler.cut
        columns = [draw(policy, cache.hidden, self.temperature, numbers[0], cut)]
        for column in numbers[1:]:
            cache.advance(columns[-1][0])
            columns.append(draw(policy, cache.hidden, self.temperature, column, cut))
        text = self.sampler.text
        for facts in zip(*(torch.stack(kind).tolist() for kind in zip(*columns, strict=True)), strict=True):
            living = []
            for row, *drawn in zip(cache.rows, *facts, strict=True):
                if not row.is_done:
                    row.append(*drawn, self._ends)
                    living.append(row)
            if text.stop:
                are_stopped = text.is_stopped([row.tokens for row in living])
                for row, is_stopped in zip(living, are_stopped, strict=True):
                    row.has_ended |= is_stopped
        self._go_on(columns[-1][0])
        return steps

    def _make_room(self, steps: int) -> None:
        """Send the shortest rows back to wait, if the next tokens would outgrow the cache."""
        cache = self.cache
        while len(self.running) > 1 and cache.cells + len(self.running) * steps > self.cells:
            self.guess *= 2
            self.is_open = False
            places = sorted(range(len(cache.rows)), key=lambda place: -cache.rows[place].length)
            self.running = [cache.rows[place] for place in places]
            sent = 0
            while len(self.running) > 1 and (not sent or self.demand > self.cells):
                self.waiting.appendleft(self.running.pop())
                sent += 1
            cache.keep(sorted(places[:-sent]))

    def _go_on(self, tokens: torch.Tensor) -> None:
        """Drop rows that are done, and run the last token of the others."""
        rows = self.cache.rows
        kept = [place for place, row in enumerate(rows) if not row.is_done]
        if ended := [row for row in self.running if row.is_done]:
            self.is_open = True
            self.running = [rows[place] for place in kept]
            self.lengths += [(len(row.prompt), len(row.tokens)) for row in ended]
            self.source.end(ended)
        if len(kept) < len(rows):
            tokens = tokens[torch.tensor(self.cache.keep(kept), dtype=torch.long, device=self.device)]
        if kept:
            self.cache.advance(tokens)


def draw(
    policy: Policy, hidden: torch.Tensor, temperature: float, numbers: torch.Tensor, cut: Cut | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a token of each row, its log-probability, and the entropy of its distribution.

    `numbers`, (rows,) uniform in [0, 1), choose the token by inverting the cumulative distribution.
    """
    size = policy.rows_at_a_time
    parts = zip(hidden.split(size), numbers.split(size), strict=True)
    drawn = [
        _draw(policy.log_distribution(states, temperature, cut), temperature, part, is_cut=cut is not None)
        for states, part in parts
    ]
    tokens, logprobs, entropies = (torch.cat(column) for column in zip(*drawn, strict=True))
    return tokens, logprobs, entropies


def _draw(
    logp: torch.Tensor, temperature: float, numbers: torch.Tensor, *, is_cut: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    weights = logp.exp()
    if temperature == 0:
        tokens = logp.argmax(-1)
    else:
        # in float32, the sum of a large vocabulary would hide rare tokens
        bounds = weights.cumsum(-1, dtype=torch.float64)
        chosen = torch.searchsorted(bounds, numbers[:, None] * bounds[:, -1:], right=True)[:, 0]
        tokens = chosen.clamp_(max=logp.shape[-1] - 1)
    logprobs = logp.gather(1, tokens[:, None])[:, 0]
    if is_cut:
        logp = logp.masked_fill(weights == 0, 0.0)  # 0 log 0 is 0
    return tokens, logprobs, -(weights * logp).sum(-1)
