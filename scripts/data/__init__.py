"""Evidence about the loader, preparation and mirror of data."""
