"""Timing, devices, goals and reports, shared by all suites."""
