"""Watch the network ports of a host while a run trains on it."""
