"""Starting points: functions that return a TrainConfig."""
