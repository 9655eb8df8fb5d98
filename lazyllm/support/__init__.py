"""Helpers of the other packages: checked values, JSON, files, the hub, tables, progress bars."""
