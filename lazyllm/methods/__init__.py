"""Methods that Pruning is compared with, on the same engine; and the parser that reads any method."""
