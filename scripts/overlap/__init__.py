"""Evidence that communication is overlapped."""
