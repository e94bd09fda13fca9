"""The history of hosts: past events, and which hosts to trust."""
