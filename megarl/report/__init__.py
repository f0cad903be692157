"""One run, or two side by side, as a single HTML page that needs no network."""
