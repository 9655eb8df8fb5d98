"""Speed of the engine beside other engines and the machine's limits. Run with `python -m benchmarks`."""
