"""Metrics as mergeable statistics: what a step measured, however it was split over ranks and microbatches."""
