"""Where a server listens: what cannot be is said at once, with the option that is wrong."""

from __future__ import annotations

import socket

import pytest

from opweave_engine.server import AddressError, listen


def test_two_servers_that_start_together() -> None:
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(AddressError, match=rf"port {port}: Address already in use.*--port 0"):
            listen("127.0.0.1", port)


def test_clients_may_come_before_the_server_runs() -> None:
    with listen("127.0.0.1", 0) as bound, socket.create_connection(bound.getsockname(), 60):
        pass


@pytest.mark.parametrize("host", ["192.0.2.1", "999.1.1.1", "", "no such host", "a" * 64 + ".b"])
def test_hosts_that_are_wrong(host: str) -> None:
    with pytest.raises(AddressError) as found:
        listen(host, 0)
    message = str(found.value)
    assert repr(host) in message
    assert "--host" in message
    assert "--port" not in message
    assert "Errno" not in message
