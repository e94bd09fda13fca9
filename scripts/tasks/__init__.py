"""The 25 tasks of docs/tasks.md, done as a user does them."""
