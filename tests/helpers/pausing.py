"""`python -m dlmi` that stops itself (SIGSTOP) at its first row after `PAUSE_AFTER` in all.

So a test can send it a signal at a moment that does not depend on how fast either of them is.
"""

import os
import signal

from dlmi.cli.main import main
from dlmi.rows import count_finished
from dlmi.run.callbacks import results

_is_due = True
_append_line = results.append_line


def append_line(path, line):
    global _is_due
    _append_line(path, line)
    if _is_due and count_finished(path.parent) >= int(os.environ["PAUSE_AFTER"]):
        _is_due = False
        os.kill(os.getpid(), signal.SIGSTOP)


if __name__ == "__main__":
    results.append_line = append_line
    main()
