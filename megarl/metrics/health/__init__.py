"""Rules that watch the metrics of every step and say what is wrong and what to do: H01 to H27."""
