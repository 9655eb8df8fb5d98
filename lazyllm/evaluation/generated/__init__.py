"""Generated tasks: RULER's kinds and needles at chosen depths; they need no data."""
