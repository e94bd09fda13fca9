"""Output projection and softmax cross-entropy as one operator."""
