"""Configuration: schema, loading, resolving and the arithmetic of layouts. Nothing here imports torch."""
