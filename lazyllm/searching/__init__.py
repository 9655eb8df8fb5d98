"""Search: Optuna proposes schedules and options; trials on the same prompts by divergence and speedup."""
