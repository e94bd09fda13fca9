"""Text from a model: opened, continued token by token, served."""
