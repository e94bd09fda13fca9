"""What every process of a run did, and when: recorded, stored and shown."""
