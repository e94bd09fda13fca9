"""The history of hosts: what happened to them, and which ones to trust."""
