"""Pictures: heat maps and plots. Each module draws from plain data and computes nothing else."""
