"""Integer-only networks: from uint8 pixels to int32 logits."""
