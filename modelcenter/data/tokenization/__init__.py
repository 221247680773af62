"""From rows to token ids, with an entry in the token cache for each way of tokenising."""
