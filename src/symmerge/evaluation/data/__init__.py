"""Where inputs come from.

`text` and `images` read files and folders, `hub` Hugging Face data sets, `embedded` data that comes
with the installation. `self_generated` text and `dead_leaves` images need no data at all.
"""
