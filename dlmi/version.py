"""The version of the package; the build reads it without importing anything else."""

__version__ = "0.1.0"
