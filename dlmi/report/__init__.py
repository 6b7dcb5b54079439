"""Figures, tables and one page to read, from result files alone: no LM is needed."""
