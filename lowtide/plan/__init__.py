"""Pure arithmetic over schedules: no torch, no model."""
