"""LongBench: its items, prompts and metrics."""
