"""Where metrics go: the console line, the progress bar, the ledger and tracking services."""
