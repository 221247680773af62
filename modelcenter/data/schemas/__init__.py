"""What the columns of a table mean to a task: their roles, their usual names and the values they may hold."""
