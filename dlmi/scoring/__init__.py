"""Prompts through the LM: passes, losses, evaluation."""
