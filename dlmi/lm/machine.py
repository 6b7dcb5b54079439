"""What the CPU says of itself."""

import contextlib
import functools
import platform
from pathlib import Path


@functools.cache
def cpu_facts() -> dict[str, str]:
    """The fields of /proc/cpuinfo, those of its last core; where there is none, a name."""
    facts = {"model name": platform.processor(), "vendor_id": platform.processor(), "flags": ""}
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        pairs = (line.partition(":") for line in lines)
        facts |= {key.strip(): value.strip() for key, _, value in pairs if value}
    return facts
