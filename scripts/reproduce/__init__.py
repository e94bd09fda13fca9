"""Published results, computed again."""
