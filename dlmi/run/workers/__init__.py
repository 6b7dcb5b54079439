"""Processes that invert side by side."""
