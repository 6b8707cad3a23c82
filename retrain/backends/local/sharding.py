"""A policy whose layers are in pieces, one on each rank, by PyTorch's FSDP2 (`fully_shard`).

A layer is whole only while it runs: its pieces are gathered before, and again for its gradient. So all ranks
must gather the same layers in the same order, however many tokens each has. Every pass through the model is
therefore announced. A rank that has nothing to run, or whose pass has failed, gathers what the others do,
without computing, until nobody runs anything. So a rank that does not fit in memory can try again.

Adapters, and what is outside of the layers (embeddings, head, last norm), are whole on every rank.
Source: ZeRO, arXiv:1910.02054; FSDP, arXiv:2304.11277.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

from retrain.backends.local.loading import Policy, return_freed
from retrain.backends.local.ranks import Ranks, explained
from retrain.base.errors import ConfigError

NOTHING, FORWARD, BACKWARD = range(3)  # what a rank announces; all that run something run the same


class Shards:
    """The pieces that this rank has of a policy's layers, and its place in what all ranks gather."""

    def __init__(self, policy: Policy, model: str) -> None:
        """Find the layers; a ConfigError if the model has none."""
        lists = [module for module in policy.body.modules() if isinstance(module, torch.nn.ModuleList)]
        longest: Any = max(lists, key=lambda layers: sum(p.numel() for p in layers.parameters()), default=[])
        if len(longest) <= 1:
            raise ConfigError(
                f"[backend.options].shard: {model!r} has no list of layers that could be cut; set it to false"
            )
        self._policy = policy
        self._layers: list[Any] = [*longest]
        self._body: Any = policy.body
        self.gathered: list[int] = []  # numbers of layers, in the pass that runs
        self._kind = NOTHING
        self._passes = {FORWARD: [*range(len(longest))]}  # what each gathers

    def over(self, ranks: Ranks, device: torch.device) -> Policy:
        """Cut the layers, which are in this process's memory; return the policy, in pieces on the devices."""
        self._ranks = ranks
        self._announcements = distributed.new_group(backend="gloo")  # on the CPU: no GPU waits for one
        mesh = init_device_mesh(device.type, (ranks.size,))
        trained = {*self._policy.trainable().values()}
        for number, layer in enumerate(self._layers):
            fully_shard(layer, mesh=mesh, reshard_after_forward=True, ignored_params=trained)
            layer.set_custom_all_gather(Gather(number, self))
        # it manages no weights, but is what the layers belong to
        fully_shard(self._body, mesh=mesh, ignored_params={*self._policy.causal.parameters()})
        self._body.register_forward_pre_hook(lambda *_: self._begin(FORWARD), prepend=True)
        self._body.register_forward_hook(lambda *_: self._end(), always_call=True)
        self._policy.causal.to(device)
        self._policy = replace(self._policy, together=self.together, backward=self.backward)
        return self._policy

    def rehearse(self) -> None:
        """Run a backward pass, from which every rank then knows what one gathers."""
        ids = torch.zeros((1, 2), dtype=torch.long, device=self._policy.device)
        states = self._body(input_ids=ids, use_cache=False).last_hidden_state
        with self.backward():
            torch.autograd.backward([states.sum()])
        for parameter in self._policy.trainable().values():
            parameter.grad = None
        return_freed()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Announce a backward pass, which the body is."""
        self._begin(BACKWARD)
        try:
            yield
        finally:
            self._end()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run any number of passes, of which other ranks may have more or fewer; end when all do."""
        try:
            yield
        except Exception:
            self._serve()
            raise
        self._serve()

    def _serve(self) -> None:
        while not self._ranks.is_broken and (kind := self._announce(NOTHING)):
            self._kind, self.gathered = kind, []
            self._end()

    def _begin(self, kind: int) -> None:
        if kind == FORWARD and self.gathered:  # FSDP remembers every forward pass until a backward one
            self._body.reset_iter_state()
        self._announce(kind)
        self._kind, self.gathered = kind, []

    def _end(self) -> None:
        """Gather what the pass has not, because it failed, or is another rank's."""
        order = self._passes.setdefault(self._kind, self.gathered)
        if len(self.gathered) == len(order) or self._ranks.is_broken:
            return
        self._body.reset_iter_state()
        for number in order[len(self.gathered) :]:
            self._layers[number].unshard()
            self._layers[number].reshard()

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """Do something that all ranks do; if it fails, nobody knows what others have done, and all end."""
        try:
            with explained():
                yield
        except BaseException:
            self._ranks.is_broken = True
            raise

    def _announce(self, kind: int) -> int:
        """Return what ranks run next; NOTHING if all have ended."""
        next_kind = torch.tensor(kind)
        with self.exchange():
            distributed.all_reduce(next_kind, distributed.ReduceOp.MAX, self._announcements)
        return int(next_kind)


class Gather(DefaultAllGather):  # type: ignore[misc]
    """Gathers a layer, and counts that."""

    def __init__(self, number: int, shards: Shards) -> None:
        self._number, self._shards = number, shards

    def __call__(self, *tensors: torch.Tensor, **how: Any) -> Any:
        self._shards.gathered.append(self._number)
        with self._shards.exchange():
            return super().__call__(*tensors, **how)
