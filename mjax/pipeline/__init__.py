"""Pipeline parallelism: schedules, the cut of the model, the executor."""
