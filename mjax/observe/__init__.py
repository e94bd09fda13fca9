"""Record, store and show what each process of a run did, and when."""
