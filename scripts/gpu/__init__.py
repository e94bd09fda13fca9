"""Evidence from a GPU: the report, and the times that choose tile sizes."""
