"""A run: the inverter, its data module, its queue, its rows."""
