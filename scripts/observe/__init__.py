"""Evidence about observing runs."""
