"""Evidence for the planner."""
