"""Sources of inputs.

`text` and `images` read files and folders, `hub` reads Hugging Face data sets, `embedded` data
comes with the installation. `self_generated` text and `dead_leaves` images need no data at all.
"""
