"""The arithmetic of the losses: log-probs, KL, masked sums and returns. Pure functions of tensors."""
