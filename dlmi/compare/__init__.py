"""A grid of methods, prompt lengths and seeds over one set of targets; each cell is a `fit`."""
