"""What all tests share: a passive OpenMP, no network, a clean environment, and the embedded model."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Before any library loads: spinning OpenMP threads beside ours cost 20 times in speed on two cores (docs/log.md).
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest

from edgees import model_path


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """edgees fetches nothing, so no test may either: a connection to another machine fails the test."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in ("127.0.0.1", "::1", "localhost"):
            raise AssertionError(f"a test wanted to connect to {address}")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing of the user's EDGEES_* settings reaches a test but EDGEES_ISA, and --debug of one test no other."""
    for name in [name for name in os.environ if name.startswith("EDGEES_") and name != "EDGEES_ISA"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("EDGEES_DEBUG", "0")
    yield


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The GGUF file of the embedded model. Where it is missing the test is skipped, but in CI it fails."""
    path = model_path.embedded()
    if path is None:
        message = f"the embedded model is not installed ({model_path.INSTALL})"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    return path
