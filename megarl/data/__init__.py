"""Where prompts come from, and how scored groups become the tensors of a training step."""
