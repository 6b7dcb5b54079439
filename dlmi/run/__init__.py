"""A run: the inverter, its data module, its slots, its rows."""
