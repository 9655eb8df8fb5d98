"""Evaluation: one runner over tasks and settings, its results, scores and reports."""
