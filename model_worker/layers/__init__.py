"""Parts that models share. A layer holds its weights as plain tensors and names where a checkpoint's weights go (its weight slots)."""
