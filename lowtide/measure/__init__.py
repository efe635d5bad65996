"""Measuring models: building them, their inputs, one training step, what a step holds."""
