"""All engines of a run behind one call: engines inside the ranks (`inprocess`), or servers (`servers`)."""
