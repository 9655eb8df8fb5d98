"""Calibration: a schedule for one checkpoint, the best of a few that are tried on prompts."""
