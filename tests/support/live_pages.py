"""A server of live pages in a thread."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.waiting import PHASE_S, deadline, wait_until

TOKEN = "secret-token"


@contextmanager
def serve_folder(target: Path) -> Iterator[str]:
    """Serve a run or a folder of runs; yield the address with its token."""
    from qfleet.report.live import LOOPBACK, LiveApp, LiveServer, Watched

    server = LiveServer(LiveApp(Watched(target), TOKEN))
    with socket.create_server((LOOPBACK, 0)) as listener:
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        try:
            wait_until(lambda: server.started, "the server starts")
            yield f"http://{LOOPBACK}:{listener.getsockname()[1]}/?token={TOKEN}"
        finally:
            server.should_exit = True
            thread.join(deadline(PHASE_S))
            assert not thread.is_alive()
