"""A fuzzer of every format that symmerge reads: `make fuzz SEED=1 CASES=2000`.

samples (good inputs) -> mutators (damage one file) -> targets (which verb reads it)
-> sandbox (one forked child per case, with limits) -> judge (was it clean?) -> runner (counts).
"""
