"""How fast this tool is on this machine, against named references in the same run."""
