"""The server: a listening socket, a thread with uvicorn, and the sessions."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import secrets
import socket
import threading
from collections.abc import Sequence

from edgees.backends.base import CENTRE, Completion, Engine, Member, Request
from edgees.endpoint.app import App
from edgees.endpoint.bridge import Bridge, Policy, Session
from edgees.errors import EngineError, MissingExtra, UsageError

LARGEST = 10_000_000
"""Bytes of a body."""
QUEUE = 256
KEEP_ALIVE_S = 600
"""An agent may think or run tools for so long between two requests on one connection."""
START_S = 30.0


class Endpoint:
    """A server for an engine's members; a :class:`edgees.backends.base.Source` for ``engine.serve(endpoint)``.

    queue: requests that may wait for the engine; more get 429. port 0: the system chooses. exposed: other addresses
    than those of this machine alone are allowed. name: what the model is called.

    :raises MissingExtra: uvicorn is not there. :raises UsageError: the address cannot be listened on.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        queue: int = QUEUE,
        host: str = "127.0.0.1",
        port: int = 0,
        largest: int = LARGEST,
        exposed: bool = False,
        name: str = "edgees",
    ) -> None:
        if not exposed and not is_loopback(host):
            raise UsageError(f"{host} can be reached from other machines", "use 127.0.0.1")
        self.host, self.port = host, port
        self.bridge = Bridge(engine, queue)
        self.app = App(self.bridge, name, largest)
        self._thread: threading.Thread | None = None
        self._stop: threading.Event = threading.Event()
        self._failure: BaseException | None = None

    @property
    def url(self) -> str:
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    # ---- sessions
    def open(self, member: Member, policy: Policy) -> Session:
        """A session of its own token. Close it when its episode is over."""
        token = secrets.token_urlsafe(24)
        session = Session(self.bridge, token, f"{self.url}/{token}", member, policy)
        self.bridge.add(session)
        return session

    def open_to_all(self, policy: Policy, api_key: str = "") -> Session:
        """The unperturbed model for everybody, at the plain address. api_key: what they must show; empty: nothing."""
        self.app.public = Session(self.bridge, "", self.url, CENTRE, policy)
        self.app.api_key = api_key
        return self.app.public

    # ---- the engine's side
    def take(self, room: int, idle: bool) -> Sequence[tuple[int, Request]] | None:
        return self.bridge.take(room, idle)

    def piece(self, ticket: int, data: bytes) -> bool:
        return self.bridge.piece(ticket, data)

    def done(self, ticket: int, completion: Completion) -> None:
        self.bridge.done(ticket, completion)

    def finish(self) -> None:
        """End the engine's ``serve`` once what runs is answered. What waits then is answered by the next ``serve``."""
        self.bridge.finish()

    # ---- the server's side
    def start(self) -> None:
        try:
            import uvicorn
        except ImportError as error:
            raise MissingExtra("the endpoint needs the package uvicorn", 'pip install "edgees[agents]"') from error
        listening = _listen(self.host, self.port)
        self.port = int(listening.getsockname()[1])
        config = uvicorn.Config(
            self.app,
            interface="asgi3",
            lifespan="off",
            ws="none",
            log_config=None,
            log_level=logging.CRITICAL,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=2,
        )
        server = uvicorn.Server(config)
        ready = threading.Event()

        async def run() -> None:
            self.bridge.loop = asyncio.get_running_loop()
            serving = asyncio.ensure_future(server.serve(sockets=[listening]))
            ready.set()
            await serving

        def thread() -> None:
            try:
                asyncio.run(run())
            except BaseException as error:
                self._failure = error
            finally:
                listening.close()
                ready.set()

        self._server = server
        self._thread = threading.Thread(target=thread, name="edgees-endpoint", daemon=True)
        self._thread.start()
        if not ready.wait(START_S) or self._failure:
            raise EngineError(f"the endpoint did not start: {self._failure or 'too slow'}")

    def close(self) -> None:
        """Whatever waits gets 503; ``take`` says that no more will come; the thread ends."""
        self.bridge.close()
        if self._thread is not None:
            self._server.should_exit = True
            self._thread.join()
            self._thread = None

    def __enter__(self) -> Endpoint:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this machine only."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(1024)
    except OSError as error:
        listening.close()
        raise UsageError(f"{host}:{port} cannot be listened on: {error.strerror}", "choose another port") from error
    return listening
