"""Rows to token ids, each way of tokenising with its entry in the token cache."""
