"""What every process of a run did, and when: written, kept, and shown."""
