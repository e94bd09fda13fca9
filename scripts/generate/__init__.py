"""Evidence about generation and its server."""
