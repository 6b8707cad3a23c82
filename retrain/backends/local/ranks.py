"""Ranks: the processes of one run, one per device, each with the whole policy.

Rank 0 is the run's worker. It keeps the optimizer, the random generator and everything else of the run,
starts the other ranks, those of its own machine as its children, and sends each a share of a call:
completions to sample, samples to train on. They talk over a pipe each, or a connection between nodes. Only
tensors go through torch.distributed: gradients to rank 0, once all ranks have theirs, and weights from it. So
the policy's state is in one place, and no rank waits in a collective that another will not join.

A rank that dies ends the attempt: rank 0 is told by SIGCHLD, and by the end of the pipe. The other ranks end
when rank 0 does, however it ends: by the end of the pipe, and on Linux by the kernel, even if suspended.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import pickle
import platform
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from importlib import metadata
from multiprocessing.connection import Connection
from typing import Any, Protocol, TypeVar

import torch
from torch import distributed

from retrain.backends import BackendSpec, RankCall
from retrain.backends.local import PACKAGES
from retrain.backends.local.nodes import COMMAND, INTERFACE, Nodes
from retrain.base import distribution
from retrain.base.errors import ConfigError, InfrastructureError, first_line
from retrain.base.event_loop import begun
from retrain.control.machine import cpu_capacity

HOST = "127.0.0.1"
COLLECTIVE_S = 300  # longest silence of a rank that has said that it is ready
POLL_S = 0.2  # between looks at whether ranks can connect
LAST_S = 10.0  # for a process to end after its pipe has
AT_A_TIME = 2**24  # numbers that are sent together: 64 MiB
LOOPBACK = {"linux": "lo", "darwin": "lo0"}

T = TypeVar("T")
Command = tuple[Any, ...]  # the name of what a rank is to do, and its arguments


@dataclass(frozen=True)
class Start:
    """What a rank is told first."""

    rank: int
    size: int
    devices: int  # ranks of a node
    host: str  # of rank 0, as the rank reaches it
    port: int  # of rank 0's store, by which ranks find each other
    seed: int
    model: str
    lora_rank: int
    options: Mapping[str, Any]  # [backend.options]


@dataclass(frozen=True)
class Ready:
    """A rank has its gradient, or it did not fit in memory; it waits for whether all have."""

    fits: bool


@dataclass(frozen=True)
class Told:
    """A number that a call of `Ranks.call` tells rank 0."""

    number: int


@dataclass(frozen=True)
class Done:
    """A rank's part of a call."""

    value: Any


@dataclass(frozen=True)
class Failed:
    """Why a rank has no part of a call."""

    error: Exception


class Pipe(Protocol):
    """The way from a rank to rank 0."""

    def recv(self) -> Any: ...
    def send(self, message: object) -> None: ...


class Link:
    """Another rank, as rank 0 sees it."""

    def __init__(self, rank: int, pipe: Connection, process: subprocess.Popen[bytes]) -> None:
        self.rank, self._pipe, self.process = rank, pipe, process
        self._early: Done | Failed | None = None  # its answer, which came while it was to be ready
        self.told: Callable[[int], object] = lambda _: None

    @classmethod
    def start(cls, rank: int) -> Link:
        """Start a rank on this machine."""
        pipe, theirs = multiprocessing.Pipe()
        with theirs:
            number = theirs.fileno()
            command = [*COMMAND, str(number)]
            return cls(rank, pipe, subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[number]))

    def end_problem(self) -> str:
        """Return how the process ended; "" if it runs."""
        code = self.process.poll()
        if code is None:
            return ""
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        if code == -signal.SIGKILL:
            how += " (the machine may be out of memory)"
        return f"rank {self.rank} (process {self.process.pid}) {how}"

    def send(self, message: object) -> None:
        """Send a message, and where Python finds the user's own code that may be in it."""
        try:
            self._pipe.send((sys.path, pickle.dumps(message)))
        except OSError as error:
            raise self._lost() from error
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            raise ConfigError(
                f"[backend.options].devices: {error}; several devices need a loss of your own, and the "
                "columns of prompts for a reward with PURE = True, that pickle can send, such as a function "
                "at the top level of its file; or use 1"
            ) from error

    def check(self) -> None:
        """Raise the error of a rank that has failed; of one that is done, its answer is kept."""
        if self._early is None and self._pipe.poll():
            self._early = self.answer()
            _value(self._early)

    def is_ready(self) -> bool:
        """Return whether the rank's gradient fits, once it has one."""
        message = self._receive()
        if isinstance(message, Ready):
            return message.fits
        self._early = message
        return False

    def agree(self, *, is_whole: bool) -> None:
        """Tell a rank that is ready whether all ranks have their gradients."""
        if self._early is None:
            self.send(is_whole)

    def answer(self) -> Done | Failed:
        """Return what came of a command; a rank that is ready is told that the others are not."""
        answer, self._early = self._early, None
        while answer is None:
            message = self._receive()
            if isinstance(message, Ready):
                self.send(False)
            else:
                answer = message
        return answer

    def _receive(self) -> Ready | Done | Failed:
        try:
            while isinstance(message := self._pipe.recv(), Told):
                self.told(message.number)
        except (EOFError, OSError) as error:
            raise self._lost() from error
        answer: Ready | Done | Failed = message
        return answer

    def _lost(self) -> InfrastructureError:
        """Return what is to be raised, because the rank's end of the pipe is closed."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(LAST_S)
        return _ended(self.end_problem() or f"rank {self.rank} does not answer")

    def close(self) -> None:
        self._pipe.close()
        self.process.kill()
        self.process.wait()


class NodeLink(Link):
    """A rank on another node; its process here is srun, which is that of all of them."""

    is_lost = False

    def end_problem(self) -> str:
        has_ended = self.is_lost or self.process.poll() is not None
        return f"rank {self.rank}, on another node, has ended or was lost with it" if has_ended else ""

    def _lost(self) -> InfrastructureError:
        self.is_lost = True
        return _ended(self.end_problem())

    def close(self) -> None:
        """Do nothing: all of them are ended together."""


class Ranks:
    """All ranks, as one of them sees them; alone, nothing is sent."""

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        pipe: Pipe | None = None,
        devices: int = 0,
        store: tuple[int, str] = (0, ""),
    ) -> None:
        """Be a rank that rank 0 commands through a pipe, or the only one.

        Args:
            devices: those of a node.
            store: port and host of rank 0's.
        """
        self.rank, self.size, self._pipe, self.devices = rank, size, pipe, devices or size
        self._store_of_0 = store
        self._links: list[Link] = []
        self._nodes: Nodes | None = None  # other ones
        self._store: distributed.TCPStore | None = None
        self._before: Any = None  # handler of SIGCHLD
        self.is_broken = False  # a rank has ended, so that this one is ending
        self.cores: tuple[float, ...] = ()  # of each of several, for programs: rank 0 has its machine's

    @classmethod
    def start(cls, spec: BackendSpec, devices: int, nodes: int = 1) -> Ranks:
        """Start the other ranks, which load the policy meanwhile."""
        ranks = cls(0, devices * nodes, devices=devices)
        if ranks.size == 1:
            return ranks
        table = dict(spec.options)
        ranks.cores = (cpu_capacity(), *[0.0] * (devices - 1))
        try:
            ranks._store = store_at(0, HOST if nodes == 1 else "")
            port = ranks._store.port
            start = Start(0, ranks.size, devices, HOST, port, spec.seed, spec.model, spec.lora_rank, table)
            if nodes > 1:  # first, because they choose the network of all
                ranks._nodes = Nodes(nodes, devices)
                remotes = sorted(ranks._nodes.remotes.items())
                ranks.cores += tuple(remote.cores for _, remote in remotes)
                for rank, remote in remotes:
                    ranks._links.append(NodeLink(rank, remote.connection, ranks._nodes.process))
                    ranks._links[-1].send(replace(start, rank=rank, host=remote.own_address))
            for rank in range(1, devices):
                ranks._links.insert(rank - 1, link := Link.start(rank))
                link.send(replace(start, rank=rank))
            if threading.current_thread() is threading.main_thread():
                ranks._before = signal.signal(signal.SIGCHLD, lambda *_: ranks._require_alive())
                if ranks._nodes:
                    ranks._nodes.watch(ranks._lose)
        except OSError as error:
            ranks.close()
            why = f"no further rank can be started ({error.strerror})"
            raise InfrastructureError(f"[backend.options].devices: {why}; use fewer") from error
        except BaseException:
            ranks.close()
            raise
        return ranks

    def join(
        self, device: torch.device, causal: torch.nn.Module, tokenizer: Any, *, reads_all: bool = False
    ) -> None:
        """Wait until all ranks have loaded the model, all the same one, and connect them.

        With `reads_all`, rank 0 sends no weights that others have read, trained or not.
        """
        if self.size == 1:
            return
        own = {**versions(), **digests(causal, tokenizer, reads_all=reads_all)}
        if self._pipe is not None:
            self._pipe.send(Done(own))
            self._pipe.recv()
            self._connect(store_at(*self._store_of_0), device)
        elif self._store is not None:
            for link in self._links:  # before they connect, in which one that is missing would be waited for
                if problem := other_version(link.rank, own, _value(link.answer())):
                    raise ConfigError(f"[backend.options].devices: {problem}")
            for link in self._links:
                link.send(None)
            connecting = begun(partial(self._connect, self._store, device))
            while not wait([connecting], POLL_S).done:  # in Python, which a signal interrupts
                for link in self._links:
                    link.check()
            connecting.result()

    def _connect(self, store: distributed.TCPStore, device: torch.device) -> None:
        """Join the group of torch.distributed, in which tensors on such devices are exchanged."""
        if sys.platform in LOOPBACK:
            os.environ.setdefault(INTERFACE, LOOPBACK[sys.platform])
        with explained():
            distributed.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                store=store,
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(seconds=COLLECTIVE_S),
            )

    def together(self, commands: Sequence[Command], own: Callable[[], T]) -> tuple[T, list[Any]]:
        """Send each other rank its command, do the own part meanwhile; return it and theirs.

        A failed part is raised once every rank is done; the own one first.
        """
        for link, command in zip(self._links, commands, strict=True):
            link.send(command)
        try:
            value = own()
        except Exception:
            # which else would answer the next command with this one's part
            if not self.is_broken:
                self.answers()
            raise
        return value, self.values()

    def call(self, calls: Sequence[RankCall], told: Callable[[int], object]) -> list[Any]:
        """Return what a call gives on each rank; `told` gets the numbers that those of other ranks tell."""
        problem = self._end_problem()
        if problem or self.is_broken:  # else this one would wait for those that are left
            raise _ended(problem or "ranks have failed in an exchange")
        for link in self._links:
            link.told = told
        own, others = self.together([("call", call) for call in calls[1:]], lambda: calls[0](lambda _: None))
        return [own, *others]

    def tell(self, number: int) -> None:
        """Tell rank 0 a number, of the call that it waits for."""
        if self._pipe is not None:
            self._pipe.send(Told(number))

    def values(self) -> list[Any]:
        """Wait for every rank's part; raise the error of one that has failed."""
        return [_value(answer) for answer in self.answers()]

    def answers(self) -> list[Done | Failed]:
        """Wait for what came of every rank's command."""
        return [link.answer() for link in self._links]

    def are_ready(self, *, fits: bool) -> bool:
        """Wait until every rank has its gradient; return whether all have, and may exchange them."""
        if self._pipe is not None:
            self._pipe.send(Ready(fits))
            is_whole: bool = self._pipe.recv()
            return is_whole
        is_whole = all([fits, *[link.is_ready() for link in self._links]])
        for link in self._links:
            link.agree(is_whole=is_whole)
        return is_whole

    def reduce(self, tensors: Sequence[torch.Tensor]) -> None:
        """Add up the tensors of all ranks at rank 0, in place; the other ranks' are left undefined."""
        self._exchange(tensors, lambda flat: distributed.reduce(flat, 0))

    def gather(self, tensors: Sequence[torch.Tensor]) -> Iterator[tuple[int, list[list[torch.Tensor]]]]:
        """Iterate at rank 0 over each rank's tensors, some at a time, and the number of the first of them."""
        first = 0
        for part in _parts(tensors):
            flat = torch.cat([tensor.flatten().float() for tensor in part])
            flats = [torch.empty_like(flat) for _ in range(self.size)] if self.rank == 0 else None
            with explained():
                distributed.gather(flat, flats)
            if flats is not None:
                sizes = [tensor.numel() for tensor in part]
                yield (
                    first,
                    [
                        [
                            values.view_as(tensor)
                            for values, tensor in zip(each.split(sizes), part, strict=True)
                        ]
                        for each in flats
                    ],
                )
            first += len(part)

    def spread(self, tensors: Sequence[torch.Tensor]) -> None:
        """Give all ranks the tensors of rank 0, in place."""
        self._exchange(tensors, lambda flat: distributed.broadcast(flat, 0))

    def _exchange(
        self, tensors: Sequence[torch.Tensor], collective: Callable[[torch.Tensor], object]
    ) -> None:
        if self.size == 1:
            return
        for part in _parts(tensors):
            flat = torch.cat([tensor.flatten().float() for tensor in part])
            with explained():
                collective(flat)
            for tensor, values in zip(part, flat.split([t.numel() for t in part]), strict=True):
                tensor.copy_(values.view_as(tensor))

    def _lose(self, rank: int) -> None:
        """Note that the connection to a rank on another node has ended."""
        for link in self._links:
            if isinstance(link, NodeLink) and link.rank == rank:
                link.is_lost = True

    def _require_alive(self) -> None:
        """Raise for a rank that has ended; once, since rank 0 ends by it."""
        if problem := self._end_problem():
            self._restore()
            self.is_broken = True
            raise _ended(problem)

    def _end_problem(self) -> str:
        return next(filter(None, (link.end_problem() for link in self._links)), "")

    def _restore(self) -> None:
        if self._before is not None:
            signal.signal(signal.SIGCHLD, self._before)
            self._before = None

    def close(self) -> None:
        """End the other ranks; safe to call twice."""
        self._restore()
        if self.is_broken:  # its error may have interrupted `no_grad` as that began or ended
            torch.set_grad_enabled(True)
        links, self._links = self._links, []
        for link in links:
            link.close()
        if self._nodes is not None:
            self._nodes.close()
        if self.size > 1 and distributed.is_initialized():
            distributed.destroy_process_group()


def shares(weights: Sequence[float], loads: list[float]) -> list[list[int]]:
    """Return the numbers of weights for each rank, in order; `loads` are what each has, and grow by them.

    The heaviest goes first, to whichever rank has least: at most 4/3 of the best cut (Graham, "Bounds on
    multiprocessing timing anomalies", SIAM J. Appl. Math. 1969). It depends on nothing but the weights, so
    that a resumed run cuts, and rounds, alike.
    """
    numbers: list[list[int]] = [[] for _ in loads]
    for number in sorted(range(len(weights)), key=lambda each: -weights[each]):
        rank = loads.index(min(loads))
        loads[rank] += weights[number]
        numbers[rank].append(number)
    return [sorted(each) for each in numbers]


def versions() -> dict[str, str]:
    """Return the versions on which the numbers of a rank depend."""
    packages = {name: metadata.version(name) for name in PACKAGES}
    return {"python": platform.python_version(), "retrain": distribution.version(), **packages}


def digests(causal: torch.nn.Module, tokenizer: Any, *, reads_all: bool = False) -> dict[str, str]:
    """Return digests of what each rank reads: of words, and of the weights that rank 0 does not send it.

    It sends those that are trained, unless each rank `reads_all`. The weights' bits are added up as whole
    numbers, which gives the same on any device.
    """
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = {
        name: (list(p.shape), int(p.detach().view(whole[p.element_size()]).sum(dtype=torch.int64)))
        for name, p in causal.named_parameters()
        if reads_all or not p.requires_grad
    }
    read = {"the model with digest": sums, "the tokenizer with digest": tokenizer.get_vocab()}
    texts = {name: json.dumps(content, sort_keys=True) for name, content in read.items()}
    return {name: hashlib.sha256(text.encode()).hexdigest()[:12] for name, text in texts.items()}


def other_version(rank: int, own: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """Return the first thing of which a rank has another version than rank 0; "" if none."""
    for name, number in own.items():
        if theirs.get(name) != number:
            other = theirs.get(name, "not installed")
            return f"rank {rank} has {name} {other}, and rank 0 {number}; all need the same"
    return ""


def store_at(port: int, host: str) -> distributed.TCPStore:
    """Return the store of rank 0, which serves it at any free port, for which 0 stands.

    There, host is the address that it listens at, "" for all: without a socket, PyTorch takes all.
    """
    limit, own = timedelta(seconds=COLLECTIVE_S), None
    if port == 0:
        with socket.create_server((host, 0)) as server:
            port, own = server.getsockname()[1], server.detach()
    with explained():
        return distributed.TCPStore(
            host or HOST,
            port,
            is_master=own is not None,
            wait_for_workers=False,
            timeout=limit,
            master_listen_fd=own,
        )


@contextmanager
def explained() -> Iterator[None]:
    """Convert an error of torch.distributed into one that says that a retry may help."""
    try:
        yield
    except RuntimeError as error:
        raise InfrastructureError(f"the ranks have lost each other ({first_line(error)})") from error


def _ended(problem: str) -> InfrastructureError:
    return InfrastructureError(f"{problem}; all ranks of the run end with it")


def _value(answer: Done | Failed) -> Any:
    if isinstance(answer, Failed):
        raise answer.error
    return answer.value


def _parts(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    part: list[torch.Tensor] = []
    for tensor in tensors:
        if part and sum(each.numel() for each in part) + tensor.numel() > AT_A_TIME:
            yield part
            part = []
        part.append(tensor)
    if part:
        yield part
