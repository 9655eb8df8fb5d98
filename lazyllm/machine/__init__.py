"""The machine: where a model is placed, how much memory there is, what is installed."""
