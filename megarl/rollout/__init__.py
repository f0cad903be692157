"""Where a step's groups come from: the policy's own samples, or demonstrations."""
