"""The algorithms: one file reads as one algorithm."""
