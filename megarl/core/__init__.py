"""The nouns of the program: samples, batches, the world, the protocols and the errors."""
