"""Evidence about the checks of hosts."""
