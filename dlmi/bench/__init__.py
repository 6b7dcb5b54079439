"""Speed of this package on this machine, next to references measured in the same run."""
