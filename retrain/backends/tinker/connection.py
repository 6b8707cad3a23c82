"""The SDK's service client: opened without blocking the event loop, closed after its calls have ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Literal

import tinker

from retrain.backends import BackendSpec
from retrain.backends.tinker import TinkerOptions
from retrain.backends.tinker.calls import Calls
from retrain.backends.tinker.faults import FAULTS, Fault, classify, describe
from retrain.errors import ConfigError, InfrastructureError
from retrain.event_loop import in_thread

LEAVING: tuple[type[Exception], ...] = (*FAULTS, InfrastructureError)
GOODBYE_S = 5.0  # timeout of closing; the API also ends a session without heartbeat
log = logging.getLogger(__name__)


class Connection:
    """One session with the API at a time."""

    def __init__(self, spec: BackendSpec, options: TinkerOptions, calls: Calls) -> None:
        self._spec = spec
        self._options = options
        self._calls = calls
        self._service: tinker.ServiceClient | None = None
        self._farewells: set[asyncio.Future[None]] = set()
        self._over = asyncio.Event()  # no call is in flight or will follow

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
                async with asyncio.timeout(self._options.connect_timeout_s):
                    # in a thread, because the SDK blocks until the session is open
                    await in_thread(lambda: service.holder, unwanted=lambda holder: holder.close())

            await self._calls.once("session", connect)
            self._service = service
        return self._service

    def drop(self) -> None:
        """Drop the session; the next use opens a new one."""
        service, self._service = self._service, None
        if service is not None:
            farewell = asyncio.ensure_future(self._leave(service))
            self._farewells.add(farewell)
            farewell.add_done_callback(self._farewells.discard)

    async def close(self) -> None:
        """End the session and all dropped ones."""
        service, self._service = self._service, None
        self._over.set()
        endings = [*self._farewells]
        if service is not None:
            endings.append(asyncio.ensure_future(self._end(service, "success")))
        await asyncio.gather(*endings)

    async def _leave(self, service: tinker.ServiceClient) -> None:
        """Close a session after all of its calls must have ended, because closing makes calls hang."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._options.call_timeout_s):
                await self._over.wait()
        await self._end(service, "errored")

    async def _end(self, service: tinker.ServiceClient, status: Literal["success", "errored"]) -> None:
        holder = service.holder
        try:
            async with asyncio.timeout(GOODBYE_S):
                await self._calls.once("goodbye", lambda: service.close(status))
        except LEAVING as error:
            log.info("a session could not be closed: %s", describe(error))
        finally:
            holder.close()  # ends heartbeat and connections, even without a permit for the closing call
