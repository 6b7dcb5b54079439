"""The frozen language model: loading, placement, its passes, shared prefixes, rows per pass."""
