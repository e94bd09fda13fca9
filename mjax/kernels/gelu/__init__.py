"""Non-linearities of the feed-forward layer, with their biases."""
