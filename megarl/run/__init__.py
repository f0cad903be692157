"""A run: its stages, the loop, and what it leaves behind."""
