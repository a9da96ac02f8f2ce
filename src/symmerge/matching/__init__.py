"""Solvers: each finds one group element per space, and returns it with evidence.

| file | what it holds |
|---|---|
| `base` | what solvers return: `Solution`, `Universe` |
| `weights`, `activations` | matching by weights, by activations |
| `search` | what these two share: options, and the search over weightings |
| `sweeps`, `heads` | one solve: alternate over all spaces; match attention heads |
| `evidence` | the tensors to match, and how much each counts |
| `learned`, `soft` | by gradient: exact symmetries, soft permutations |
| `learning/`, `optimization/` | what these two share, and the optimisation loop |
| `universes` | many models at once |
| `recipes`, `non_symmetric` | ours and the published methods by name |
| `resume` | files that long solves are continued from |

To add a solver, write a frozen dataclass of keyword-only options with a class variable `method`,
`solve(a, b, *, progress, resume_file) -> Solution`, and `record()` (the options as JSON). If it
differs only in the evidence it uses, derive it from `search.Matching` and write `probe` and `grid`.
Then add it to `recipes.Solver`, a row to `recipes.RECIPES` and its method to `recipes.BY_METHOD`.
"""
