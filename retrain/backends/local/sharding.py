"""A policy whose layers are in pieces, one on each rank, by PyTorch's FSDP2 (`fully_shard`).

A layer is whole only while it runs: its pieces are gathered before, and again for its gradient. If it is
trained, its gradient is added up over ranks, of which each keeps a piece. So all ranks must exchange the same
layers in the same order, however many tokens each has. Every pass through the model is therefore announced. A
rank that has nothing to run, or whose pass has failed, exchanges what the others do, with zeros as its
gradient, until nobody runs anything. So a rank that does not fit in memory can try again.

Adapters, and what is outside of the layers (embeddings, head, last norm), are whole on every rank. If all
weights are trained, those too have their gradient, moments and float32 copies in pieces.
Source: ZeRO, arXiv:1910.02054; FSDP, arXiv:2304.11277.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.tensor import DTensor

from retrain.backends.local.loading import Policy, return_freed
from retrain.backends.local.ranks import Ranks, explained
from retrain.backends.local.training import MASTER, MOMENTS, PREVIOUS, Measured, Optimizer
from retrain.base.errors import ConfigError, InfrastructureError, first_line

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
        self.exchanged: list[tuple[type, int]] = []  # how, and number of the layer, in the pass that runs
        self._kind = NOTHING
        self._passes: dict[int, list[tuple[type, int]]] = {  # what each exchanges
            FORWARD: [(Gather, number) for number in range(len(longest))]
        }

    def over(self, ranks: Ranks, device: torch.device) -> Policy:
        """Cut the layers, which are in this process's memory; return the policy, in pieces on the devices."""
        self._ranks = ranks
        self._announcements = distributed.new_group(backend="gloo")  # on the CPU: no GPU waits for one
        mesh = init_device_mesh(device.type, (ranks.size,))
        adapters = set() if self._policy.adapters is None else {*self._policy.trainable().values()}
        for number, layer in enumerate(self._layers):
            precision = self._precision(layer)
            fully_shard(
                layer, mesh=mesh, reshard_after_forward=True, mp_policy=precision, ignored_params=adapters
            )
            layer.set_custom_all_gather(Gather(number, self))
            layer.set_custom_reduce_scatter(Reduce(number, self))
            layer.set_gradient_divide_factor(1.0)  # the loss counts over all ranks: gradients are added up
            layer.set_force_sum_reduction_for_comms(True)
            layer.set_reduce_scatter_unused_params(True)
        # it manages no weights, but is what the layers belong to
        fully_shard(self._body, mesh=mesh, ignored_params={*self._policy.causal.parameters()})
        self._body.register_forward_pre_hook(lambda *_: self._begin(FORWARD), prepend=True)
        self._body.register_forward_hook(lambda *_: self._end(), always_call=True)
        self._policy.causal.to(device)
        self._policy = replace(self._policy, together=self.together, backward=self.backward)
        return self._policy

    def _precision(self, layer: torch.nn.Module) -> MixedPrecisionPolicy:
        """Return how a layer's weights are gathered; those that are trained become float32 in pieces."""
        dtype = self._policy.causal.dtype
        if self._policy.adapters is not None or dtype == torch.float32:
            return MixedPrecisionPolicy()
        for parameter in layer.parameters():
            if parameter.dtype != dtype:
                problem = "the layers have weights of several types, which are not trained in pieces"
                raise ConfigError(f'[backend.options].shard: {problem}; set dtype = "float32"')
            parameter.data = parameter.data.float()
        return MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)

    def optimizer(self, weight_decay: float) -> PieceOptimizer:
        return PieceOptimizer(self._policy, weight_decay, self._ranks)

    def rehearse(self) -> None:
        """Run a backward pass, from which every rank then knows what one exchanges."""
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
            self._kind, self.exchanged = kind, []
            self._end()

    def _begin(self, kind: int) -> None:
        if kind == FORWARD and self.exchanged:  # FSDP remembers every forward pass until a backward one
            self._body.reset_iter_state()
        self._announce(kind)
        self._kind, self.exchanged = kind, []

    def _end(self) -> None:
        """Exchange what the pass has not, because it failed, or is another rank's."""
        order = self._passes.setdefault(self._kind, self.exchanged)
        if len(self.exchanged) == len(order) or self._ranks.is_broken:
            return
        self._body.reset_iter_state()
        for how, number in order[len(self.exchanged) :]:
            if how is Gather:
                self._layers[number].unshard()
                self._layers[number].reshard()
            else:  # of no gradients, which stand for zeros, or of what a failed pass has left, to be dropped
                (weights,) = self._layers[number]._get_fsdp_state()._fsdp_param_groups
                weights.post_backward()
        self._body.reset_iter_state()

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


class Exchange:
    """Has a layer's pieces exchanged as FSDP2 does, and notes that."""

    def __init__(self, number: int, shards: Shards) -> None:
        self._number, self._shards = number, shards

    def __call__(self, *tensors: torch.Tensor, **how: Any) -> Any:
        self._shards.exchanged.append((type(self), self._number))
        with self._shards.exchange():
            return super().__call__(*tensors, **how)  # type: ignore[misc]


class Gather(Exchange, DefaultAllGather):  # type: ignore[misc]
    """Gathers a layer."""


class Reduce(Exchange, DefaultReduceScatter):  # type: ignore[misc]
    """Adds up a layer's gradient, of which each rank gets its piece."""


class PieceOptimizer(Optimizer):
    """Optimizes this rank's pieces of all weights: rows of each, as `fully_shard` cuts them.

    Each rank takes every step. What is outside of the layers is then sent to the others, which have it whole.
    """

    is_cut = True

    def __init__(self, policy: Policy, weight_decay: float, ranks: Ranks) -> None:
        self._whole, self._ranks = policy.trainable(), ranks
        pieces = {
            name: p.to_local() if isinstance(p, DTensor) else self._own(p) for name, p in self._whole.items()
        }
        super().__init__({n: torch.nn.Parameter(p.detach()) for n, p in pieces.items()}, weight_decay)
        self._sources = [*self._whole.values()]
        self._rows: dict[int, torch.Tensor] = {}  # of gradients of what is whole: room for those of this rank
        self.parts = {"step": super().step, "reset": super().reset, "state": self._sent, "take": self._take}

    def _on_all(self, name: str, *arguments: Any) -> Any:
        """Have all ranks do something, of which this one, rank 0, returns what it gave here."""
        command = (name, *arguments)
        own, _ = self._ranks.together(
            [command] * (self._ranks.size - 1), partial(self.parts[name], *arguments)
        )
        return own

    def reset(self) -> None:
        self._on_all("reset")

    def step(self, lr: float, scale: float) -> None:
        try:
            self._on_all("step", lr, scale)
        except (RuntimeError, MemoryError) as error:
            raise InfrastructureError(f"a step was not taken on all ranks ({first_line(error)})") from error

    def _own(self, whole: torch.Tensor, rank: int | None = None) -> torch.Tensor:
        """Return a rank's rows, a view."""
        rows = -(-len(whole) // self._ranks.size)
        return whole[rows * (self._ranks.rank if rank is None else rank) :][:rows]

    def _parts(self, whole: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Iterate over the ranks that have rows, and these."""
        parts = ((rank, self._own(whole, rank)) for rank in range(self._ranks.size))
        return ((rank, part) for rank, part in parts if part.numel())

    def complete(self) -> None:
        self.collect()  # what passes of other ranks have left here
        self.end_part()
        self.begin_moments()
        self._rows = {
            number: torch.empty_like(self._masters[number].detach())
            for number, source in enumerate(self._sources)
            if not isinstance(source, DTensor)
        }

    def gather(self, ranks: Ranks, *, is_measured: bool) -> list[float]:
        """Add up the gradients of what is whole, of which each rank keeps its rows."""
        for number in [*self._rows]:
            with explained():
                for rank, part in self._parts(self._sums[number]):
                    distributed.reduce(part, rank)
            self._sums[number] = self._rows.pop(number).copy_(self._own(self._sums[number]))
        return [0.0] if is_measured else []  # of the whole batch: no rank's own gradient is known

    def measured(self, squares: Sequence[float]) -> Measured:
        return self.measure(squares, [()])

    def _write_back(self) -> None:
        super()._write_back()
        for source in self._sources:
            if not isinstance(source, DTensor):
                with explained():
                    for rank, rows in self._parts(source.detach()):
                        distributed.broadcast(rows, rank)

    def state(self) -> dict[str, torch.Tensor]:
        """Return all moments and float32 weights, whole, in this machine's memory."""
        tensors: dict[str, torch.Tensor] = self._on_all("state")
        return tensors

    def _sent(self) -> dict[str, torch.Tensor]:
        """Return at rank 0 what all ranks send there; nothing at the others."""
        tensors = {}
        masters = {MASTER + name: master.detach() for name, _, master in self._named()}
        for name, piece in {**super()._tensors(), **masters}.items():
            with explained():
                if self._ranks.rank == 0:
                    whole = piece.new_empty(self._whole[name.partition(".")[2]].shape)
                    for rank, rows in self._parts(whole):
                        if rank:
                            distributed.recv(rows, rank)
                        else:
                            rows.copy_(piece)
                    tensors[name] = whole.cpu()
                elif piece.numel():
                    distributed.send(piece.contiguous(), 0)
        return tensors

    def load(self, tensors: Mapping[str, torch.Tensor], steps: int) -> None:
        """Restore what `state` returned after `steps` steps, on all ranks."""
        kinds = [f"{moment}." for moment in MOMENTS] + [MASTER]
        if PREVIOUS + self._names[0] in tensors:
            kinds.append(PREVIOUS)
        for name, p in self._whole.items():
            if any(tensors[kind + name].shape != p.shape for kind in kinds):
                raise ValueError(f"the state of {name} does not have its shape")
        others = [("take", kinds, steps)] * (self._ranks.size - 1)
        self._ranks.together(others, partial(self._take, kinds, steps, tensors))

    def _take(self, kinds: list[str], steps: int, tensors: Mapping[str, torch.Tensor] | None = None) -> None:
        """Take the pieces of this rank, which rank 0 sends."""
        pieces: dict[str, torch.Tensor] = {}
        for name, _, master in self._named():
            for kind in kinds:
                key = kind + name
                piece = pieces[key] = torch.empty_like(master.detach())
                with explained():
                    if tensors is not None:
                        for rank, rows in self._parts(tensors[key].to(master.device, torch.float32)):
                            if rank:
                                distributed.send(rows.contiguous(), rank)
                            else:
                                piece.copy_(rows)
                    elif piece.numel():
                        distributed.recv(piece, 0)
        with torch.no_grad():
            for name, _, master in self._named():
                master.copy_(pieces[MASTER + name])
        super().load(pieces, steps)
