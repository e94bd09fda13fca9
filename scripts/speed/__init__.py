"""Evidence about the time around a step: host, compilation, launches."""
