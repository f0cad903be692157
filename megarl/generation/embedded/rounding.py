"""What keeps a row's numbers independent of the rows beside it.

Every row's numbers depend on that row alone, as far as the matrix library allows: prompts are packed without padding,
contexts are rounded up to `CONTEXT_STEP` positions (the surplus is masked to exact zeros) and no product has fewer than
`MIN_ROWS` rows, not even that of an expert with one token. On a CPU in fp32 the numbers are then equal bit for bit
whatever shares the batch (an exception: contexts of 192 to 384 positions with 4 or more query heads per kv head);
elsewhere they are equal to rounding.
"""

# Products of fewer rows take another path through MKL and oneDNN (matrix times vector) and round differently.
MIN_ROWS = 4
CONTEXT_STEP = 16
