"""Merge aligned models into one checkpoint: means, slerp, TIES, DARE, soups, REPAIR, mergekit."""
