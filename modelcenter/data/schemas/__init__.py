"""The columns of a table for each task: their roles, their usual names and the values they may hold."""
