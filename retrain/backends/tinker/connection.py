"""The SDK's service client: opened without blocking the event loop, closed after its calls have ended.

A worker that is killed leaves a session behind, whose model takes a place on the server. Its id is in the
run's directory, so that the next attempt ends it before it makes a model of its own, and so does any run of
the campaign that finds no room.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Literal

import httpx
import tinker
from tinker.lib.client_connection_pool_type import ClientConnectionPoolType
from tinker.lib.internal_client_holder import InternalClientHolder

from retrain.backends import BackendSpec
from retrain.backends.tinker.calls import ApiCalls, backoff_s
from retrain.backends.tinker.faults import FAULTS, Fault, classify, describe, is_unpaid, status_told
from retrain.backends.tinker.outages import Outages
from retrain.base.errors import ConfigError, InfrastructureError
from retrain.base.event_loop import in_thread
from retrain.base.locks import is_abandoned
from retrain.records.files import write_json
from retrain.records.layout import campaign_of, files_of_runs

LEAVING: tuple[type[Exception], ...] = (*FAULTS, InfrastructureError)
GOODBYE_S = 5.0  # timeout of closing; the API also ends a session without heartbeat
NOTE = "tinker-session.json"  # in the run's directory, while a session is open
SLOW_S = 2.0  # without a session, until the API is considered to be down
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 10.0  # between polls for results that the API answers with errors
log = logging.getLogger(__name__)


class Connection:
    """One session with the API at a time."""

    def __init__(self, spec: BackendSpec, calls: ApiCalls) -> None:
        self._spec, self.calls = spec, calls
        self._service: tinker.ServiceClient | None = None
        self._farewells: set[asyncio.Future[None]] = set()
        self._note = None if spec.notes is None else spec.notes / NOTE
        self._abandoned = "" if self._note is None else self._left_by(self._note)  # by an earlier attempt
        self._ended: set[str] = set()  # sessions of other runs

    async def try_out(self) -> None:
        """Open a session; a ConfigError if the key or the address is rejected."""
        try:
            await self.service()
        except FAULTS as error:
            where = self._spec.base_url or "its default address"
            if classify(error) in (Fault.REFUSED, Fault.WRONG):
                raise ConfigError(
                    f"the Tinker API at {where} refuses the session ({describe(error)}); "
                    "check the environment's TINKER_API_KEY"
                ) from error
            if is_unpaid(error):
                raise InfrastructureError(
                    f"the Tinker API at {where} waits for its bill to be paid ({describe(error)}); "
                    "pay it, then continue with `retrain resume`"
                ) from error
            raise InfrastructureError(
                f"the Tinker API at {where} cannot be reached ({describe(error)}); "
                "check [model].base_url and the network"
            ) from error

    async def service(self) -> tinker.ServiceClient:
        """Return the service client with an open session. May fail like any call."""
        if self._service is None:
            service = tinker.ServiceClient(
                user_metadata={"run": self._spec.run_name}, base_url=self._spec.base_url or None
            )

            async def connect() -> None:
                outages, loop = self.calls.outages, asyncio.get_running_loop()
                late = loop.call_later(SLOW_S, outages.failed, "it opens no session", time.monotonic())
                try:
                    async with asyncio.timeout(self.calls.options.connect_timeout_s):
                        with outages.request(is_poll=False), status_told():
                            # in a thread, because the SDK blocks until the session is open
                            await in_thread(lambda: service.holder, unwanted=lambda holder: holder.close())
                finally:
                    late.cancel()

            await self.calls.once("session", connect)
            _watch_requests(service.holder, self.calls.outages)
            await self._end_abandoned(service.holder)
            self._service = service
        return self._service

    def drop(self) -> None:
        """Drop the session; the next use opens a new one."""
        service, self._service = self._service, None
        if service is not None:
            farewell = asyncio.ensure_future(self._leave(service, self.calls.in_flight()))
            self._farewells.add(farewell)
            farewell.add_done_callback(self._farewells.discard)

    async def close(self) -> None:
        """End the session and all dropped ones."""
        service, self._service = self._service, None
        endings = [*self._farewells]
        if service is not None:
            endings.append(asyncio.ensure_future(self._end(service, "success")))
        await asyncio.gather(*endings)
        if self._note is not None:
            with contextlib.suppress(OSError):  # the session that it names has ended
                self._note.unlink()

    async def make_room(self) -> None:
        """End the sessions that killed workers of this campaign left at the API."""
        if self._note is None:
            return
        holder, mine = (await self.service()).holder, self._note.parent
        for run in files_of_runs(campaign_of(mine)).values():
            session = self._left_by(run.directory / NOTE)
            if run.directory == mine or not session or session in self._ended:
                continue
            if await in_thread(partial(is_abandoned, run.lock)):
                log.warning("ending the session that a killed worker of %s left", run.directory.name)
                await self._goodbye(partial(_finish, holder, session))
                self._ended.add(session)

    async def _leave(self, service: tinker.ServiceClient, calls: Collection[asyncio.Event]) -> None:
        """Close a session after all of its calls have ended, because closing makes calls hang."""
        for ended in calls:
            await ended.wait()  # each has a timeout of its own
        await self._end(service, "errored")

    async def _end(self, service: tinker.ServiceClient, status: Literal["success", "errored"]) -> None:
        holder = service.holder
        try:
            await self._goodbye(lambda: service.close(status))
        finally:
            holder.close()  # ends heartbeat and connections, even without a permit for the closing call

    async def _goodbye(self, finish: Callable[[], Awaitable[None]]) -> None:
        try:
            async with asyncio.timeout(GOODBYE_S):
                await self.calls.once("goodbye", finish)
        except LEAVING as error:
            log.info("a session could not be closed: %s", describe(error))

    def _where(self, note: Path) -> dict[str, str]:
        return {"directory": str(note.parent.resolve()), "base_url": self._spec.base_url}

    def _left_by(self, note: Path) -> str:
        """Return the session that a note tells of; "" if it is none, damaged, or copied with another run."""
        try:
            note_facts = json.loads(note.read_text(encoding="utf-8"))
            return str(note_facts["session"]) if note_facts.items() >= self._where(note).items() else ""
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return ""

    async def _end_abandoned(self, holder: InternalClientHolder) -> None:
        """End the session of an attempt of this run that was killed, and note the id of this one."""
        if self._note is None:
            return
        where = self._where(self._note)
        if session := self._abandoned:
            self._abandoned = ""
            await self._goodbye(partial(_finish, holder, session))
        write_json(self._note, {"session": holder.get_session_id(), **where}, durable=False)


def _finish(holder: InternalClientHolder, session: str) -> Awaitable[None]:
    """End another session with the connections of this one."""

    async def post() -> None:
        with holder.aclient(ClientConnectionPoolType.TRAIN) as client:
            body = {"reason": {"type": "interrupted"}, "detail": "its worker ended without closing it"}
            await client.post(f"/api/v1/sessions/{session}/finish", body=body, cast_to=NoneType)

    done: Awaitable[None] = holder.run_coroutine_threadsafe(post())
    return done


def _watch_requests(holder: InternalClientHolder, outages: Outages) -> None:
    """Note what the API answers, and pause between polls for results while it fails: the SDK does neither."""
    sdk_client, failures = holder.aclient, 0

    async def note(response: httpx.Response) -> None:
        outages.answered(response.status_code)

    async def pause(response: httpx.Response) -> None:
        nonlocal failures
        if response.status_code == 200 and "json" in response.headers.get("content-type", ""):
            await response.aread()  # some servers say so that they have paused a call, and not with 408
            with contextlib.suppress(ValueError):
                outages.said(response.json())
        failures = failures + 1 if response.status_code >= 500 else 0
        if failures:
            await asyncio.sleep(backoff_s(failures, FIRST_PAUSE_S, LONGEST_PAUSE_S))

    @contextlib.contextmanager
    def aclient(kind: ClientConnectionPoolType) -> Iterator[tinker.AsyncTinker]:
        is_poll = kind is ClientConnectionPoolType.RETRIEVE_PROMISE
        with outages.request(is_poll=is_poll), sdk_client(kind) as client:
            hooks = client._client.event_hooks["response"]  # httpx's: there is no other place between polls
            if note not in hooks:
                hooks += [note, pause] if is_poll else [note]
            yield client

    holder.aclient = aclient
