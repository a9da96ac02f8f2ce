"""Are two checkpoints related? Undisguise one, compare what was held out: evidence, p-values.

| file | what it holds |
|---|---|
| `disguise`, `shared` | undo the symmetry between two models, cut to what both have |
| `swaps` | the test: would the held-out tensors rather have two units swapped? |
| `units` | the units of every layer, and the two tests on them |
| `depth` | which layer of one model each layer of another came from |
| `likeness` | how alike they are, layer by layer and kind by kind of tensor |
| `relation`, `traces` | what these figures say: a copy, a fine-tune, a merge, pruned, ... |
| `merges` | of which models is this one a merge, and with what shares |
| `fingerprints` | a small file per model, to compare one model with many |
| `examine`, `results` | `kinship`, and what is stored of it |
"""
