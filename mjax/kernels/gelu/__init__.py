"""Activation functions of the feed-forward layer, with their biases."""
