"""Calibration: stages for one checkpoint, from what its dense passes attend to and from trials."""
