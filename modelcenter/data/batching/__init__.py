"""From rows of tokens to packed batches: choosing the rows of a batch, and concatenating them."""
