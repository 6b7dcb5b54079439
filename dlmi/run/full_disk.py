"""A full disk that only a background thread has met ends the run.

TensorBoard writes in a thread of its own. When that thread dies of a full disk, the main thread may
wait for it for ever, so the error is passed on by a signal.
"""

import signal
import threading
from types import FrameType

from dlmi.errors import is_disk_full


def watch_threads() -> None:
    """Raise a full disk that any thread meets in the main thread. Call it there."""
    show = threading.excepthook
    met: list[BaseException] = []

    def tell_main_thread(details: threading.ExceptHookArgs) -> None:
        if details.exc_value is None or not is_disk_full(details.exc_value):
            show(details)
            return
        met.append(details.exc_value)
        main_id = threading.main_thread().ident
        assert main_id is not None
        signal.pthread_kill(main_id, signal.SIGUSR2)

    def raise_it(signum: int, frame: FrameType | None) -> None:
        if met:
            raise met[0]

    threading.excepthook = tell_main_thread
    signal.signal(signal.SIGUSR2, raise_it)
