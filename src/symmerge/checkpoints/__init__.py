"""Files in, files out: lazy weights, reading, writing, atomic folders, hub names, hashes."""
