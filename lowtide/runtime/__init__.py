"""The mechanism: watches blocks being called, recomputes them in backward. Needs nothing but torch."""
