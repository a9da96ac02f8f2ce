"""From aligned models to one checkpoint: means, slerp, ties, dare, soups, REPAIR, mergekit."""
