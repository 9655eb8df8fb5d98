"""`lazyllm bench`: the machine's ceilings, the engine and its peers, measured in turn in one run."""
