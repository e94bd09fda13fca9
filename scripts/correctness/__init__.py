"""Evidence that layouts compute what one device computes."""
