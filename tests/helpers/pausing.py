"""`python -m dlmi`, each worker of which waits before step `PAUSE_AT` for a file in `PAUSE_IN`.

So a test can send it a signal at a moment that does not depend on how fast either of them is. Only
the main thread waits: with SIGSTOP worker 0 would keep the others from their targets.
"""

import os
import time
from pathlib import Path

from dlmi import Inverter
from dlmi.cli.main import main

_begin = Inverter.on_train_batch_start


def on_train_batch_start(self, *arguments):
    if self.trainer.global_step == int(os.environ["PAUSE_AT"]):
        folder = Path(os.environ["PAUSE_IN"])
        (folder / str(os.getpid())).touch()
        while not (folder / "go").exists():
            time.sleep(0.01)
    return _begin(self, *arguments)


if __name__ == "__main__":
    Inverter.on_train_batch_start = on_train_batch_start
    main()
