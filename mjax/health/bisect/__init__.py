"""Find bad hosts and links by tests of groups of hosts."""
