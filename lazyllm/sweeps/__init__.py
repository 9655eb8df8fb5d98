"""Sweeps: many settings on the same prompts, by quality and speed."""
