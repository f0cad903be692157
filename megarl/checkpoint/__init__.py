"""Checkpoints: the state of all ranks on disk, complete or invisible, readable in any layout."""
