"""How fast this tool is on this machine, against named references in the same run."""

from dlmi.bench.command import bench_command

__all__ = ["bench_command"]
