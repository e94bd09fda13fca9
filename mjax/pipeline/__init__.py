"""Pipeline parallelism: schedules, partition of the layers, executor."""
